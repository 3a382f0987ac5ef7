"""The settings of a run are those of its start. A setting that changes afterwards is an error in the next step."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.facts import facts
from tests.integration.trainers.core_advantages import TRAINERS, config_for
from tests.integration.trainers.random_batches import random_batches
from verl_ext.errors import ConfigurationError


class Change(NamedTuple):
    """A setting that is changed during a run, and the words of the error."""

    algorithm: dict[str, Any]
    """The section `algorithm` at the start of the run."""
    path: str
    value: Any
    words: tuple[str, ...]


KEYS = ["a", "b"]
GDPO = {"rewards": {"keys": KEYS, "weights": [1, 2]}, "gdpo": {"whiten": "token"}}
GDPO_IN_VERLS_NAMES = {"gdpo_reward_keys": KEYS, "gdpo_reward_weights": [1, 2], "gdpo": {"whiten": "token"}}
CHANGES = {
    "the weights": Change(GDPO, "rewards.weights", [2, 1], ("algorithm.rewards.weights", "[1, 2]", "[2, 1]", "start")),
    "weights that were not set": Change({"rewards": {"keys": KEYS}}, "rewards.weights", [2, 1], ("None", "[2, 1]")),
    "a section without the weights": Change(
        GDPO, "rewards", {"keys": KEYS}, ("algorithm.rewards.weights", "[1, 2]", "None")
    ),
    "weights that are removed": Change(GDPO, "rewards.weights", None, ("[1, 2]", "None")),
    "verl's name of the weights": Change(
        GDPO_IN_VERLS_NAMES,
        "gdpo_reward_weights",
        [2, 1],
        ("algorithm.gdpo_reward_weights", "[1, 2]", "[2, 1]"),
    ),
    "the other name of the weights": Change(
        GDPO, "gdpo_reward_weights", [2, 1], ("algorithm.gdpo_reward_weights", "None")
    ),
    "a setting of the estimator": Change(GDPO, "gdpo.whiten", "none", ("algorithm.gdpo.whiten", "'token'", "'none'")),
    "the estimator": Change(GDPO, "adv_estimator", "drgrpo", ("algorithm.adv_estimator", "'gdpo'", "'drgrpo'")),
    "a setting of verl": Change(GDPO, "norm_adv_by_std_in_grpo", False, ("norm_adv_by_std_in_grpo", "True", "False")),
}


class RepeatedRun:
    """A trainer that computes the advantages of one random batch again and again."""

    def __init__(self, trainer: str, data: st.DataObject, name: str, algorithm: dict[str, Any]) -> None:
        self.runs = import_module(f"tests.integration.trainers.{trainer}_runs")
        self.batch = data.draw(random_batches(sessions=self.runs.HAS_SESSIONS))
        self.trainer = self.runs.make_trainer(config_for(name, algorithm))

    def step(self) -> None:
        self.runs.run_step(self.trainer, self.batch, hooked=False)

    def change(self, path: str, value: Any) -> None:
        """Change an entry of the section `algorithm` of the trainer's configuration."""
        OmegaConf.update(self.trainer.config, f"algorithm.{path}", value, merge=False, force_add=True)


def for_each_trainer(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test with two random batches of each trainer."""
    with_data = settings(max_examples=2)(given(data=st.data())(test))
    return pytest.mark.parametrize("trainer", TRAINERS)(with_data)


@pytest.mark.parametrize("case", CHANGES)
@for_each_trainer
def test_a_setting_that_changes_during_a_run_is_an_error(trainer: str, case: str, data: st.DataObject) -> None:
    change = CHANGES[case]
    run = RepeatedRun(trainer, data, "gdpo", change.algorithm)
    for _ in range(2):
        run.step()
    run.change(change.path, change.value)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=facts(*change.words)):
            run.step()


@for_each_trainer
def test_the_same_value_in_another_form_is_no_change(trainer: str, data: st.DataObject) -> None:
    run = RepeatedRun(trainer, data, "gdpo", GDPO)
    run.change("rewards.weights", [1.0, 2.0])
    run.step()
    OmegaConf.update(run.trainer.config, "weights", [1, 2], force_add=True)
    run.change("rewards.weights", "${weights}")
    run.step()
    run.change("gamma", 0.5)  # verl_ext does not read this setting
    run.step()
    OmegaConf.update(run.trainer.config, "weights", [2, 1])  # the interpolation now has another value
    with pytest.raises(ConfigurationError, match=facts("algorithm.rewards.weights", "[2, 1]")):
        run.step()


@for_each_trainer
def test_with_an_estimator_of_verl_only_settings_of_verl_ext_are_fixed(trainer: str, data: st.DataObject) -> None:
    run = RepeatedRun(trainer, data, "grpo", {"rewards": {"keys": KEYS}})
    for norm in (False, True):  # verl reads this setting in every step
        run.change("norm_adv_by_std_in_grpo", norm)
        run.step()
    run.change("rewards.keys", ["b", "a"])
    with pytest.raises(ConfigurationError, match=facts("algorithm.rewards.keys", "['a', 'b']", "['b', 'a']")):
        run.step()


@for_each_trainer
def test_a_run_without_verl_ext_may_change_its_settings(trainer: str, data: st.DataObject) -> None:
    run = RepeatedRun(trainer, data, "grpo", {})
    run.step()
    run.change("gdpo_reward_weights", [1, 2])
    run.step()
