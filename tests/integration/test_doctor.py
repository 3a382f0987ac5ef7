"""`python -m verl_ext doctor`, in new interpreters as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

import verl_ext


def doctor(before: str = "", **environment: str) -> tuple[int, str]:
    """Exit status and output; `before` runs first, in the same interpreter."""
    code = f"{textwrap.dedent(before)}\nfrom verl_ext.cli import main\nraise SystemExit(main(['doctor']))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout


def test_where_all_is_well_it_names_versions_estimators_and_hooks():
    status, told = doctor()
    assert status == 0, told
    assert told.startswith(f"verl_ext {verl_ext.__version__} on Python")
    assert told.endswith("all is well\n")
    assert "FAIL" not in told
    for line in (
        "ok    verl loaded the plugin",
        "ok    gdpo by verl_ext, in place of verl.trainer.ppo.core_algos.compute_gdpo_outcome_advantage",
        "ok    hadw by verl_ext",
        "ok    verl.trainer.ppo.v1.trainer_base: the default (V1) trainer",
    ):
        assert line in told


def test_plugins_switched_off_are_named_with_the_remedy():
    status, told = doctor(VERL_USE_EXTERNAL_PLUGINS="none")
    assert status == 1
    assert "FAIL  VERL_USE_EXTERNAL_PLUGINS=none keeps verl from loading the plugin" in told
    assert "FAIL  dgpo is not registered" in told
    assert "FAIL  gdpo is registered by verl.trainer.ppo.core_algos" in told


def test_a_verl_that_moved_is_named_by_function():
    status, told = doctor(
        """
        from verl_ext.integration.imports import after_import

        def moved(module):
            def get_adv_estimator_fn(name, scope):
                raise NotImplementedError
            module.get_adv_estimator_fn = get_adv_estimator_fn

        after_import("verl.trainer.ppo.core_algos", moved)
        """
    )
    assert status == 1
    assert "takes (name, scope), expected (name_or_enum)" in told
    assert "supported: verl>=0.9.0" in told


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("verl", "FAIL  verl cannot be imported"),
        ("cachetools", "FAIL  cachetools is missing"),
        ("verl_ext.cpu.plugin", "FAIL  the plugin could not set itself up: ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_imported_is_named(missing: str, message: str):
    status, told = doctor(f"import sys\nsys.modules[{missing!r}] = None")
    assert status == 1
    assert message in told
    assert "pip install" in told


def test_a_verl_that_breaks_in_its_own_way_is_said_too():
    code = "import sys, types\nsys.modules['verl'] = types.ModuleType('verl')"
    status, told = doctor(code)
    assert status == 1
    assert "FAIL  verl cannot be imported: AttributeError" in told
