"""The settings of a run are those of its start: one that somebody changes afterwards ends the next step."""

from importlib import import_module
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.facts import facts
from tests.integration.conftest import has_default_trainer
from tests.integration.trainers.drawn import batches, config_for
from verl_ext.errors import ConfigurationError

TRAINERS = pytest.mark.parametrize("trainer", ["ray", *["default"] * has_default_trainer()])
KEYS = ["a", "b"]
OURS = {"rewards": {"keys": KEYS, "weights": [1, 2]}, "gdpo": {"whiten": "token"}}
CHANGED: dict[str, tuple[dict[str, Any], str, Any, tuple[str, ...]]] = {
    "the weights": (OURS, "rewards.weights", [2, 1], ("algorithm.rewards.weights", "[1, 2]", "[2, 1]", "start")),
    "weights that were not set": ({"rewards": {"keys": KEYS}}, "rewards.weights", [2, 1], ("None", "[2, 1]")),
    "a section without the weights": (OURS, "rewards", {"keys": KEYS}, ("algorithm.rewards.weights", "[1, 2]", "None")),
    "weights that are removed": (OURS, "rewards.weights", None, ("[1, 2]", "None")),
    "verl's name of the weights": (
        {"gdpo_reward_keys": KEYS, "gdpo_reward_weights": [1, 2], "gdpo": {"whiten": "token"}},
        "gdpo_reward_weights",
        [2, 1],
        ("algorithm.gdpo_reward_weights", "[1, 2]", "[2, 1]"),
    ),
    "the other name of the weights": (OURS, "gdpo_reward_weights", [2, 1], ("algorithm.gdpo_reward_weights", "None")),
    "a setting of the estimator": (OURS, "gdpo.whiten", "none", ("algorithm.gdpo.whiten", "'token'", "'none'")),
    "the estimator": (OURS, "adv_estimator", "drgrpo", ("algorithm.adv_estimator", "'gdpo'", "'drgrpo'")),
    "a setting of verl": (OURS, "norm_adv_by_std_in_grpo", False, ("norm_adv_by_std_in_grpo", "True", "False")),
}


def trainer_of(runs: Any, name: str, algorithm: dict[str, Any]) -> Any:
    return runs.made(config_for(name, algorithm))


def change(trainer: Any, path: str, value: Any) -> None:
    OmegaConf.update(trainer.config, f"algorithm.{path}", value, merge=False, force_add=True)


@TRAINERS
@pytest.mark.parametrize("case", CHANGED)
@settings(max_examples=2)
@given(data=st.data())
def test_a_setting_that_changes_during_a_run_ends_the_next_step(trainer: str, case: str, data: st.DataObject) -> None:
    algorithm, path, value, words = CHANGED[case]
    runs = import_module(f"tests.integration.trainers.{trainer}_runs")
    drawn = data.draw(batches(sessions=runs.SESSIONS))
    made = trainer_of(runs, "gdpo", algorithm)
    for _ in range(2):
        runs.step(made, drawn, hooked=False)
    change(made, path, value)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=facts(*words)):
            runs.step(made, drawn, hooked=False)


@TRAINERS
@settings(max_examples=2)
@given(data=st.data())
def test_a_setting_that_is_written_otherwise_or_restored_is_no_change(trainer: str, data: st.DataObject) -> None:
    """Nor is one that nothing of this package reads."""
    runs = import_module(f"tests.integration.trainers.{trainer}_runs")
    drawn = data.draw(batches(sessions=runs.SESSIONS))
    made = trainer_of(runs, "gdpo", OURS)
    changes = [("rewards.weights", [1.0, 2.0]), ("rewards.weights", "${weights}"), ("gamma", 0.5)]
    OmegaConf.update(made.config, "weights", [1, 2], force_add=True)
    for path, value in changes:
        change(made, path, value)
        runs.step(made, drawn, hooked=False)
    OmegaConf.update(made.config, "weights", [2, 1])  # as an interpolation has it
    with pytest.raises(ConfigurationError, match=facts("algorithm.rewards.weights", "[2, 1]")):
        runs.step(made, drawn, hooked=False)


@TRAINERS
@settings(max_examples=2)
@given(data=st.data())
def test_below_verls_own_estimator_the_settings_of_this_package_are_fixed_alone(
    trainer: str, data: st.DataObject
) -> None:
    runs = import_module(f"tests.integration.trainers.{trainer}_runs")
    drawn = data.draw(batches(sessions=runs.SESSIONS))
    made = trainer_of(runs, "grpo", {"rewards": {"keys": KEYS}})
    for norm in (False, True):  # which verl reads in every step
        change(made, "norm_adv_by_std_in_grpo", norm)
        runs.step(made, drawn, hooked=False)
    change(made, "rewards.keys", ["b", "a"])
    with pytest.raises(ConfigurationError, match=facts("algorithm.rewards.keys", "['a', 'b']", "['b', 'a']")):
        runs.step(made, drawn, hooked=False)
    without = trainer_of(runs, "grpo", {})
    runs.step(without, drawn, hooked=False)
    change(without, "gdpo_reward_weights", [1, 2])
    runs.step(without, drawn, hooked=False)
