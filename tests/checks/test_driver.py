"""verl's own command lines: what is wrong stops them in the driver, before Ray starts."""

import logging

import pytest

from tests import fresh
from tests.configs import compose
from tests.facts import says
from verl_ext.checks import start
from verl_ext.checks.judge import SUMMARY


def main_ppo(folder, *arguments, program="verl.trainer.main_ppo"):
    return fresh.run(program, *arguments, module=True, folder=folder)


SEARCH = "hydra.searchpath=[pkg://verl.trainer.config]"
# With V1 see `checks/test_command`. The fully asynchronous trainer never calls verl's own check.
PROGRAMS = {
    "trainer.main_ppo": ("trainer.use_v1=False", "algorithm.adv_estimator=gdpo", ("gdpo", "algorithm.rewards.keys")),
    "experimental.one_step_off_policy.main_ppo": (SEARCH, "algorithm.adv_estimator=dgpo", ("dgpo", "separate_async")),
    "experimental.fully_async_policy.fully_async_main": (SEARCH, "+verl_ext=hadw", ("hadw", "separate_async")),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_entry_point_stops_before_ray_starts(tmp_path, program):
    *arguments, words = PROGRAMS[program]
    done = main_ppo(tmp_path, *arguments, f"+ray_kwargs.ray_init._temp_dir={tmp_path}/ray", program=f"verl.{program}")
    assert done.returncode == 1
    assert says(done.stderr, *words), done.stderr
    assert not (tmp_path / "ray").exists()


def test_a_driver_logs_the_summary_of_its_run_once(monkeypatch, caplog):
    """verl's main program calls two of the functions that verl_ext wraps; a run without verl_ext has no summary."""
    from verl.utils.config import validate_config

    monkeypatch.setattr(start, "_summarized", [])
    for estimator, count in (("grpo", 0), ("dgpo", 1), ("dgpo", 1)):
        config = compose(f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.actor.use_dynamic_bsz=True")
        with caplog.at_level(logging.INFO, "verl_ext"):
            validate_config(config, use_reference_policy=False, use_critic=False)
        assert caplog.text.count(SUMMARY) == count
