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
    """Return the exit status and the output. The code `before` runs first, in the same interpreter."""
    code = f"{textwrap.dedent(before)}\nfrom verl_ext.cli import main\nraise SystemExit(main(['doctor']))"
    done = fresh.run(code, environment={**os.environ, **environment})
    return done.returncode, done.stdout


def states(out: str) -> set[str]:
    """Return the states, such as `ok`, of all lines except the first and the last."""
    return {line.split()[0] for line in out.splitlines()[1:-1]}


def test_working_installation_is_reported_with_versions_estimators_and_hooks():
    status, out = doctor()
    assert status == 0, out
    assert out.startswith(f"verl_ext {verl_ext.__version__} on Python")
    assert states(out) <= {"ok", "note"}
    for package in ("verl", "torch", "ray"):
        assert a_line_says(out, "ok", package, version(package)), out
    assert a_line_says(out, "verl_ext", *TESTED)
    assert a_line_says(out, "ok", "plugin")
    assert a_line_says(out, "ok", "gdpo", "verl_ext")
    assert a_line_says(out, "ok", "hadw", "verl_ext")
    if has_default_trainer():
        assert a_line_says(out, "ok", "verl.trainer.ppo.v1.trainer_base", "V1")


WITHOUT_DEFAULT_TRAINER = """
import importlib.abc, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("verl.trainer.ppo.v1"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())
"""
WITHOUT_RAY_PPO_TRAINER = """
from verl_ext.hooks import after_import

after_import("verl.trainer.ppo.ray_trainer", lambda module: delattr(module, "RayPPOTrainer"))
"""


@pytest.mark.parametrize(
    ("before", "module", "is_default"),
    [
        (WITHOUT_DEFAULT_TRAINER, "verl.trainer.ppo.v1", True),
        (WITHOUT_RAY_PPO_TRAINER, "verl.trainer.ppo.ray_trainer", False),
    ],
    ids=["default trainer", "RayPPOTrainer"],
)
def test_missing_trainer_is_an_error_if_it_is_the_default(before: str, module: str, is_default: bool):
    """RayPPOTrainer is the default of a verl without the newer trainer."""
    status, out = doctor(before)
    is_needed = is_default == has_default_trainer()
    assert status == int(is_needed), out
    assert a_line_says(out, "error" if is_needed else "note", module)
    assert states(out) <= {"ok", "note", "error"}


WITHOUT_OPTIONAL_PACKAGES = """
import importlib.metadata as metadata
original = metadata.version

def version(name):
    if name in ("vllm", "TransferQueue"):
        raise metadata.PackageNotFoundError(name)
    return original(name)

metadata.version = version
"""


def test_missing_optional_package_is_a_note():
    status, out = doctor(WITHOUT_OPTIONAL_PACKAGES)
    assert status == 0, out
    assert a_line_says(out, "note", "vllm", "actor_rollout_ref.rollout.name=vllm"), out
    assert a_line_says(out, "note", "TransferQueue"), out


# No module of the packages can be found or has been imported, as if they were not installed.
WITHOUT_PACKAGES = """
import importlib.abc, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

for name in [name for name in sys.modules if name.partition(".")[0] in {packages!r}]:
    del sys.modules[name]
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("packages", [["verl"], ["torch"], ["torch", "verl"], ["numpy", "torch", "verl", "omegaconf"]])
def test_report_without_verl_or_torch_has_errors_and_no_traceback(packages: list[str]):
    """In a new interpreter: the usual one has imported torch before."""
    before = WITHOUT_PACKAGES.format(packages=packages)
    code = f"{before}\nfrom verl_ext.cli import main\nraise SystemExit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.startswith(f"verl_ext {verl_ext.__version__}")
    assert states(done.stdout) <= {"ok", "note", "error"}
    for package in {*packages} & {"torch", "verl"}:
        assert a_line_says(done.stdout, "error", package, "pip install 'verl_ext[verl]'"), done.stdout
    assert a_line_says(done.stdout, "error", "verl")  # verl cannot be imported without torch, either


RENAME_A_FUNCTION_OF_VERL = """
import verl.utils.config
from verl_ext import hooks

hook = next(hook for hook in hooks.HOOKS if hook.module == "verl.utils.config")
del verl.utils.config.validate_config
hook.run(verl.utils.config)
"""
BREAK_VERL = """
import sys, types

sys.modules["verl"] = types.ModuleType("verl")
"""


def test_plugins_that_are_switched_off_are_an_error():
    status, out = doctor(VERL_USE_EXTERNAL_PLUGINS="none")
    assert status == 1
    assert a_line_says(out, "error", "VERL_USE_EXTERNAL_PLUGINS=none"), out
    assert a_line_says(out, "error", "estimator dgpo"), out


def test_function_that_verl_has_renamed_is_an_error_with_the_tested_versions():
    status, out = doctor(RENAME_A_FUNCTION_OF_VERL)
    assert status == 1
    assert a_line_says(out, "error", "verl.utils.config", "validate_config", f"verl {version('verl')}", *TESTED), out


def test_broken_verl_is_an_error():
    status, out = doctor(BREAK_VERL)
    assert status == 1
    assert a_line_says(out, "error", "verl", "__version__"), out
