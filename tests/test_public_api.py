"""Names and signatures that others rely on; changing one is a new major version."""

from __future__ import annotations

import subprocess
import sys

import pytest

import verl_ext


def test_the_names_that_the_package_exports():
    assert verl_ext.__all__ == [
        "__version__",
        *("Balance", "Batch", "Centre", "Chain", "CheckpointError", "Complaint", "ConfigurationError"),
        *("DataError", "ESTIMATORS", "IntegrationError", "ScaleByMad", "ScaleByStd", "Settings", "Step"),
        *("Turns", "Update", "VerlExtError", "WeighAndSum", "WeighByDifficulty", "WeighByHistory", "Whiten"),
        *("build", "by_turn", "limited"),
    ]
    assert set(verl_ext.__all__) <= set(dir(verl_ext))
    for name in verl_ext.__all__:
        assert getattr(verl_ext, name) is not None
    with pytest.raises(AttributeError, match="'rewards_of'"):
        _ = verl_ext.rewards_of


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("verl_ext, verl_ext.cli", ("verl", "ray", "torch", "numpy", "omegaconf", "hydra", "pandas")),
        ("verl_ext.estimators, verl_ext.core.metrics, verl_ext.core.rows", ("verl", "ray", "omegaconf", "hydra")),
        ("verl_ext.cpu.plugin", ("verl", "ray", "torch", "numpy", "omegaconf", "hydra", "transformers", "yaml")),
        (
            "verl_ext.rewards.tool_calling, verl_ext.rewards.gsm8k, verl_ext.rewards.boxed_math",
            ("verl", "ray", "torch", "numpy", "omegaconf", "hydra", "scipy", "sympy", "math_verify", "transformers"),
        ),
    ],
    ids=["the package", "the pure core", "the CPU's plugin", "the scorers"],
)
def test_importing_it_imports_nothing_heavy(modules, heavy):
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert found.stdout.strip() == "[]"
