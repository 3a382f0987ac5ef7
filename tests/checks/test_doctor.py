"""`verl-ext doctor`, in interpreters that have not seen verl; `tests/test_distribution.py` starts a new one."""

import os
import textwrap

import pytest

import verl_ext
from tests import fresh
from tests.facts import a_line_says, says
from tests.integration.conftest import has_default_trainer
from verl_ext.hooks import TESTED


def doctor(before: str = "", **environment: str) -> tuple[int, str]:
    """Exit status and output; `before` runs first, in the same interpreter."""
    code = f"{textwrap.dedent(before)}\nfrom verl_ext.cli import main\nraise SystemExit(main(['doctor']))"
    done = fresh.run(code, environment={**os.environ, **environment})
    return done.returncode, done.stdout


def test_where_all_is_well_it_names_versions_estimators_and_hooks():
    status, told = doctor()
    assert status == 0, told
    assert told.startswith(f"verl_ext {verl_ext.__version__} on Python")
    assert "FAIL" not in told
    default = [("ok", "verl.trainer.ppo.v1.trainer_base", "V1")] if has_default_trainer() else []
    for line in (
        *default,
        ("verl_ext", *TESTED),
        ("ok", "plugin"),
        ("ok", "gdpo", "verl_ext"),
        ("ok", "hadw", "verl_ext"),
    ):
        assert a_line_says(told, *line)


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
    status, told = doctor(before)
    fails = default == has_default_trainer()
    assert status == int(fails), told
    assert a_line_says(told, "FAIL" if fails else "note", module)


# What happens before, an environment variable, and the failures that are named.
BROKEN = {
    "plugins are switched off": (
        "",
        {"VERL_USE_EXTERNAL_PLUGINS": "none"},
        [("VERL_USE_EXTERNAL_PLUGINS=none",), ("dgpo", "not registered")],
    ),
    "verl has moved": (
        "import verl.utils.config as c\nfrom verl_ext import hooks\n"
        "hook = next(hook for hook in hooks.HOOKS if hook.module == c.__name__)\ndel c.validate_config\nhook.run(c)",
        {},
        [("verl.utils.config has no validate_config", "is installed", "0.9.0 and 0.9.1")],
    ),
    "verl is missing": ("import sys\nsys.modules['verl'] = None", {}, [("verl", "imported")]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_is_named(case: str):
    before, environment, failures = BROKEN[case]
    status, told = doctor(before, **environment)
    assert status == 1
    for failure in failures:
        assert any(says(block, "FAIL", *failure) for block in told.replace("\n        ", " ").splitlines()), told
