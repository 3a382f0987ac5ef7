"""The main programs of verl: an error stops them in the driver, before Ray starts."""

import logging
from dataclasses import dataclass

import pytest

from tests import fresh
from tests.configs import compose
from tests.facts import says
from verl_ext.checks import start
from verl_ext.checks.judge import SUMMARY


def main_ppo(folder, *arguments, program="verl.trainer.main_ppo"):
    """Run a main program of verl in a new process, and return its status and output."""
    return fresh.run(program, *arguments, module=True, folder=folder)


@dataclass(frozen=True)
class Program:
    """A main program, its arguments, and facts of the error."""

    name: str
    arguments: tuple[str, ...]
    error: tuple[str, ...]


SEARCHPATH = "hydra.searchpath=[pkg://verl.trainer.config]"
PROGRAMS = [
    # tests/checks/test_command.py starts the same program with the default trainer.
    Program(
        "verl.trainer.main_ppo",
        ("trainer.use_v1=False", "algorithm.adv_estimator=gdpo"),
        error=("gdpo", "algorithm.rewards.keys"),
    ),
    Program(
        "verl.experimental.one_step_off_policy.main_ppo",
        (SEARCHPATH, "algorithm.adv_estimator=dgpo"),
        error=("dgpo", "separate_async"),
    ),
    # This program never calls verl's own check.
    Program(
        "verl.experimental.fully_async_policy.fully_async_main",
        (SEARCHPATH, "+verl_ext=hadw"),
        error=("hadw", "separate_async"),
    ),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_main_program_stops_before_ray_starts(tmp_path, program):
    ray_folder = tmp_path / "ray"
    done = main_ppo(tmp_path, *program.arguments, f"+ray_kwargs.ray_init._temp_dir={ray_folder}", program=program.name)
    assert done.returncode == 1
    assert says(done.stderr, *program.error), done.stderr
    assert not ray_folder.exists()


def test_driver_logs_the_summary_of_its_run_once(monkeypatch, caplog):
    """The main program of verl calls two functions that verl_ext wraps. A run without verl_ext has no summary."""
    from verl.utils.config import validate_config

    monkeypatch.setattr(start, "_summarized", [])
    caplog.set_level(logging.INFO, "verl_ext")
    dynamic_batches = "actor_rollout_ref.actor.use_dynamic_bsz=True"
    grpo = compose("algorithm.adv_estimator=grpo", dynamic_batches)
    validate_config(grpo, use_reference_policy=False, use_critic=False)
    assert caplog.text.count(SUMMARY) == 0

    dgpo = compose("algorithm.adv_estimator=dgpo", dynamic_batches)
    validate_config(dgpo, use_reference_policy=False, use_critic=False)
    assert caplog.text.count(SUMMARY) == 1

    same_run = compose("algorithm.adv_estimator=dgpo", dynamic_batches)
    validate_config(same_run, use_reference_policy=False, use_critic=False)
    assert caplog.text.count(SUMMARY) == 1
