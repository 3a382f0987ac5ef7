"""`verl-ext doctor`, in interpreters that have not seen verl; `tests/test_distribution.py` starts a new one."""

import os
import subprocess
import sys
import textwrap
from importlib.metadata import version

import pytest

import verl_ext
from tests import fresh
from tests.facts import a_line_says
from tests.integration.conftest import has_default_trainer
from verl_ext.hooks import TESTED


def doctor(before: str = "", **environment: str) -> tuple[int, str]:
    """Exit status and output; `before` runs first, in the same interpreter."""
    code = f"{textwrap.dedent(before)}\nfrom verl_ext.cli import main\nraise SystemExit(main(['doctor']))"
    done = fresh.run(code, environment={**os.environ, **environment})
    return done.returncode, done.stdout


def states(out: str) -> set[str]:
    """The states of the lines between the first and the last."""
    return {line.split()[0] for line in out.splitlines()[1:-1]}


def test_where_all_is_well_it_names_versions_estimators_and_hooks():
    status, out = doctor()
    assert status == 0, out
    assert out.startswith(f"verl_ext {verl_ext.__version__} on Python")
    assert states(out) <= {"ok", "note"}
    for package in ("verl", "torch", "ray"):
        assert a_line_says(out, "ok", package, version(package)), out
    default = [("ok", "verl.trainer.ppo.v1.trainer_base", "V1")] if has_default_trainer() else []
    for line in (
        *default,
        ("verl_ext", *TESTED),
        ("ok", "plugin"),
        ("ok", "gdpo", "verl_ext"),
        ("ok", "hadw", "verl_ext"),
    ):
        assert a_line_says(out, *line)


GONE = """
import importlib.abc, sys

class Gone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("verl.trainer.ppo.v1"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Gone())
"""
V1, RAY = "verl.trainer.ppo.v1", "verl.trainer.ppo.ray_trainer"


DROPPED = """
from verl_ext.hooks import after_import

after_import("verl.trainer.ppo.ray_trainer", lambda module: delattr(module, "RayPPOTrainer"))
"""


@pytest.mark.parametrize(("before", "module", "default"), [(GONE, V1, True), (DROPPED, RAY, False)])
def test_a_trainer_that_is_gone_is_a_failure_where_verls_main_starts_it(before: str, module: str, default: bool):
    status, out = doctor(before)
    fails = default == has_default_trainer()
    assert status == int(fails), out
    assert a_line_says(out, "error" if fails else "note", module)
    assert states(out) <= {"ok", "note", "error"}


WITHOUT = """
import importlib.metadata as metadata
original = metadata.version

def version(name):
    if name in ("vllm", "TransferQueue"):
        raise metadata.PackageNotFoundError(name)
    return original(name)

metadata.version = version
"""


def test_an_optional_package_that_is_not_installed_is_a_note():
    status, out = doctor(WITHOUT)
    assert status == 0, out
    assert a_line_says(out, "note", "vllm", "actor_rollout_ref.rollout.name=vllm"), out
    assert a_line_says(out, "note", "TransferQueue"), out


# As where a package is not installed: no module of it can be found or has been imported.
MISSING = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

for name in [name for name in sys.modules if name.partition(".")[0] in {packages!r}]:
    del sys.modules[name]
sys.meta_path.insert(0, Missing())
"""


@pytest.mark.parametrize("packages", [["verl"], ["torch"], ["torch", "verl"], ["numpy", "torch", "verl", "omegaconf"]])
def test_without_verl_or_torch_it_prints_a_report_with_errors_and_no_traceback(packages: list[str]):
    """In a new interpreter: the usual one has imported torch before."""
    code = f"{MISSING.format(packages=packages)}\nfrom verl_ext.cli import main\nraise SystemExit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.startswith(f"verl_ext {verl_ext.__version__}")
    assert states(done.stdout) <= {"ok", "note", "error"}
    for package in {*packages} & {"torch", "verl"}:
        assert a_line_says(done.stdout, "error", package, "pip install 'verl_ext[verl]'"), done.stdout
    assert a_line_says(done.stdout, "error", "verl")  # verl cannot be imported without torch, either


# What happens before, an environment variable, and the failures that are named.
BROKEN = {
    "plugins are switched off": (
        "",
        {"VERL_USE_EXTERNAL_PLUGINS": "none"},
        [("VERL_USE_EXTERNAL_PLUGINS=none",), ("estimator dgpo",)],
    ),
    "verl has moved": (
        "import verl.utils.config as c\nfrom verl_ext import hooks\n"
        "hook = next(hook for hook in hooks.HOOKS if hook.module == c.__name__)\ndel c.validate_config\nhook.run(c)",
        {},
        [("verl.utils.config", "validate_config", f"verl {version('verl')}", *TESTED)],
    ),
    "verl is broken": (
        "import sys, types\nsys.modules['verl'] = types.ModuleType('verl')",
        {},
        [("verl", "__version__")],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_is_named(case: str):
    before, environment, failures = BROKEN[case]
    status, out = doctor(before, **environment)
    assert status == 1
    for failure in failures:
        assert a_line_says(out, "error", *failure), out
