"""Names and signatures that others rely on; changing one is a new major version."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import verl_ext
from verl_ext import Batch, Chain, Settings, build, errors


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


def test_an_error_is_ours_and_of_a_standard_type():
    for kind in (errors.ConfigurationError, errors.DataError):
        assert kind.__mro__[1:3] == (errors.VerlExtError, ValueError)
    for kind in (errors.IntegrationError, errors.CheckpointError):
        assert kind.__mro__[1:3] == (errors.VerlExtError, RuntimeError)


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (build, ["name", "settings"]),
        (Settings.parse, ["algorithm", "*loss_agg_mode"]),
        (
            Batch.of,
            [
                *("rewards", "labels", "*groups", "*turns", "*keys", "*conditions", "*lengths", "*accuracy"),
                *("*kl_reward", "*outputs", "*fields"),
            ],
        ),
        (Chain.__call__, ["self", "batch", "state"]),
        (Chain.init, ["self"]),
        (errors.Complaint, ["text", "fatal"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", None),
)
def test_the_parameters_of_a_public_call(function, parameters):
    marks = {inspect.Parameter.KEYWORD_ONLY: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = [marks.get(p.kind, "") + p.name for p in inspect.signature(function).parameters.values()]
    assert found == parameters


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
