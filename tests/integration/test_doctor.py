"""`verl-ext doctor`, in interpreters that have not seen verl; `tests/test_distribution.py` starts a new one."""

from __future__ import annotations

import os
import re
import textwrap

import pytest

import verl_ext
from tests import fresh
from tests.facts import a_line_says, says
from verl_ext.integration.compat.versions import TESTED


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
    for found in (
        ("ok", "plugin"),
        ("ok", "gdpo", "verl_ext", "verl.trainer.ppo.core_algos.compute_gdpo_outcome_advantage"),
        ("ok", "hadw", "verl_ext"),
        ("ok", "verl.trainer.ppo.v1.trainer_base", "V1"),
        ("checked",),
    ):
        assert a_line_says(told, *found)


def test_plugins_switched_off_are_named_with_the_remedy():
    status, told = doctor(VERL_USE_EXTERNAL_PLUGINS="none")
    assert status == 1
    assert a_line_says(told, "FAIL", "VERL_USE_EXTERNAL_PLUGINS=none")
    assert a_line_says(told, "FAIL", "dgpo", "not registered")
    assert a_line_says(told, "FAIL", "gdpo", "verl.trainer.ppo.core_algos")


def test_all_that_moved_is_listed_and_what_only_the_cpu_needs_is_a_note():
    status, told = doctor(
        """
        import verl.trainer.ppo.v1.replay_buffer as buffers
        import verl.utils.model as model
        import verl.trainer.ppo.ray_trainer as legacy
        del buffers.ReplayBuffer._evict_terminal_groups
        del model.load_valuehead_model
        legacy.compute_data_metrics = lambda batch: {}
        """
    )
    assert status == 1
    assert a_line_says(told, "note", "watch_rollouts", "ReplayBuffer._evict_terminal_groups", "not exist")
    moved = "verl.trainer.ppo.ray_trainer.compute_data_metrics"
    assert a_line_says(told, "FAIL", moved, "(batch)", "(batch, use_critic)")
    assert a_line_says(told, "note", "verl.utils.model.load_valuehead_model", "not exist", "without a GPU")
    assert says(told, "1 problem", "verl>=0.9.0")


def test_an_experimental_trainer_whose_requirements_are_missing_is_no_failure():
    status, told = doctor(
        """
        import importlib.abc, sys

        class Missing(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name.startswith("verl.experimental.fully_async_policy.fully_async_trainer"):
                    raise ModuleNotFoundError("No module named 'other'", name="other")

        sys.meta_path.insert(0, Missing())
        """
    )
    assert status == 0, told
    assert a_line_says(told, "note", "verl.experimental.fully_async_policy.fully_async_trainer")


def test_a_caller_that_holds_verl_s_own_function_is_named():
    status, told = doctor(
        """
        import verl
        import verl.trainer.ppo.ray_trainer as legacy
        import verl.trainer.ppo.v1.utils as utils
        import verl.experimental.separation.ray_trainer as separation
        utils.compute_advantage = separation.compute_advantage = legacy.compute_advantage.__wrapped__
        """
    )
    assert status == 1
    for module in ("verl.trainer.ppo.v1.utils", "verl.experimental.separation.ray_trainer"):
        assert a_line_says(told, "FAIL", f"{module}.compute_advantage")
    assert says(told, "2 problem")


def versioned(version: str) -> tuple[int, str]:
    return doctor(f"import verl\nverl.__version__ = {version!r}")


def test_a_verl_newer_than_those_tested_is_noted_and_an_older_one_refused():
    status, told = versioned("99.1.0.dev")
    assert status == 0, told
    assert a_line_says(told, "note", "99.1.0.dev", "newer", TESTED[-1])
    assert "newer" not in versioned(TESTED[-1])[1]
    assert versioned("0.8.2")[0] == 1


def test_no_message_installs_a_package_of_our_name_from_an_index():
    """Somebody else could take the name."""
    told = "".join(doctor(f"import sys\nsys.modules[{name!r}] = None")[1] for name in ("verl", "verl_ext.cpu.plugin"))
    told += doctor("import importlib.metadata as m\nm.entry_points = lambda **given: ()")[1]
    commands = [line for line in told.splitlines() if "pip install" in line]
    assert len(commands) >= 3
    for line in commands:
        assert not re.search(r"verl[_-]ext", line.partition("pip install")[2].partition(" in a clone")[0]), line
        assert "clone" in line


@pytest.mark.parametrize(
    ("name", "module", "found"),
    [
        ("verl", None, ("verl", "imported")),
        ("verl", "types.ModuleType('verl')", ("verl", "AttributeError")),
        ("cachetools", None, ("cachetools",)),
        ("verl_ext.cpu.plugin", None, ("plugin", "ModuleNotFoundError")),
    ],
)
def test_what_cannot_be_imported_is_named(name: str, module: str | None, found: tuple[str, ...]):
    status, told = doctor(f"import sys, types\nsys.modules[{name!r}] = {module}")
    assert status == 1
    assert a_line_says(told, "FAIL", *found)
    assert "pip install" in told
