"""Configurations of other kinds than Hydra's, and what a caller may do with them between two calls."""

from __future__ import annotations

import asyncio
import functools
import inspect

import pytest
import torch
from verl.trainer.config import AlgoConfig

from verl_ext.core.rows import scores, token_counts
from verl_ext.integration.advantage.registry import estimator_function
from verl_ext.integration.compat import hooks
from verl_ext.integration.config.read import read_settings
from verl_ext.integration.trainers.attach import wrap_fit


def gdpo(config):
    given = {
        "token_level_rewards": torch.zeros(4, 2),
        "response_mask": torch.ones(4, 2),
        "index": ["a", "a", "b", "b"],
        "non_tensor_batch": {"x": [0.0, 1.0, 2.0, 5.0]},
    }
    return estimator_function("gdpo")(config=config, **given)[0][:, 0].tolist()


def test_verls_own_dataclass_is_read():
    config = AlgoConfig(adv_estimator="gdpo", gdpo_reward_keys=["x"], norm_adv_by_std_in_grpo=False)
    settings = read_settings(config)
    assert settings.rewards.keys == ("x",)
    assert settings.norm_by_std is False
    ours = {"rewards": {"keys": ["x"]}, "gdpo": {"whiten": "token"}, "norm_adv_by_std_in_grpo": False}
    assert gdpo(config) == gdpo(ours)


def test_a_configuration_changed_in_place_is_read_again():
    config = {"rewards": {"keys": ["x"]}, "gdpo": {"whiten": "sequence"}}
    gdpo(config)
    config["gdpo"]["whiten"] = "none"
    # two values at distance d have a std of d / sqrt(2): (d / 2) / (d / sqrt(2)) = 0.7071
    assert gdpo(config) == pytest.approx([-0.7071, 0.7071, -0.7071, 0.7071], abs=1e-4)


def test_a_coroutine_stays_one():
    async def fit(self):
        return "fitted"

    wrapped = wrap_fit(fit)
    assert inspect.iscoroutinefunction(wrapped)
    assert asyncio.run(wrapped(None)) == "fitted"


def test_narrow_masks_count_beyond_what_their_type_can_hold():
    assert token_counts(torch.ones(1, 1003, dtype=torch.bfloat16)).tolist() == [1003.0]


def test_infinities_of_both_signs_are_not_taken_for_not_scored():
    assert scores(torch.tensor([[float("inf"), float("-inf")]]), torch.ones(1, 2)).tolist() == [float("inf")]


def test_an_override_that_only_copied_our_mark_is_wrapped_all_the_same():
    """`functools.wraps` over a wrapped method copies its attributes, the mark among them."""

    class Trainer:
        def step(self):
            return "verl's"

    def make(original):
        return lambda self: f"ours around {original(self)}"

    hooks.wrap(Trainer, "step", make)
    inner = Trainer.step
    hooks.wrap(Trainer, "step", make)
    assert Trainer.step is inner

    class Mine(Trainer):
        @functools.wraps(Trainer.step)
        def step(self):
            return "mine"

    hooks.wrap(Mine, "step", make)
    assert Mine().step() == "ours around mine"
