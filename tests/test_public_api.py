"""The names that the package exports, and the modules that an import of it loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import verl_ext
from tests.fresh import TIMEOUT
from tests.tools.run_files import rollout_lines, write_rollouts

ROOT = Path(__file__).parents[1]
SCRIPTS = [path for folder in ("scripts", "recipes") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_exported_names_exist():
    assert set(verl_ext.__all__) <= set(dir(verl_ext))
    for name in verl_ext.__all__:
        assert getattr(verl_ext, name) is not None


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'table_of'"):
        _ = verl_ext.table_of


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("verl_ext, verl_ext.cli", ("verl", "ray", "torch", "numpy", "omegaconf", "hydra", "pandas")),
        ("verl_ext.methods, verl_ext.core.metrics, verl_ext.core.row_index", ("verl", "ray", "omegaconf", "hydra")),
        ("verl_ext.cpu.plugin", ("verl", "ray", "torch", "numpy", "omegaconf", "hydra", "transformers", "yaml")),
        (
            "verl_ext.rewards.tool_calling, verl_ext.rewards.gsm8k, verl_ext.rewards.boxed_math",
            ("verl", "ray", "torch", "numpy", "omegaconf", "hydra", "scipy", "sympy", "math_verify", "transformers"),
        ),
    ],
    ids=["the package", "the pure core", "the CPU's plugin", "the scorers"],
)
def test_import_loads_no_large_library(modules, heavy):
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == "[]"


COMPARE = """
import sys
from verl_ext.cli import main
main(sys.argv[1:])
print("LOADED", {"verl", "ray", "torch", "matplotlib"} & set(sys.modules))
"""


def test_compare_loads_neither_verl_nor_torch(tmp_path):
    folder = write_rollouts(tmp_path / "r", rollout_lines())
    command = [sys.executable, "-c", COMPARE, "compare", folder, "dgpo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.stdout.splitlines()[-1] == "LOADED set()", done.stdout + done.stderr


def imports_from_the_package(script: Path) -> list[tuple[str, str]]:
    """Return (module, name) for each name that a script imports from verl_ext."""
    imports = []
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("verl_ext"):
            imports += [(str(node.module), alias.name) for alias in node.names]
    return imports


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_names_that_a_script_imports_exist(script):
    for module, name in imports_from_the_package(script):
        exec(f"from {module} import {name}", {})
