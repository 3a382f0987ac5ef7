"""Conditions of `algorithm.rewards`: the numbers of 0.3.0, for every estimator, and what stays as it was returned."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.calls import call
from tests.estimators.every import EVERY, started
from verl_ext import Batch, Settings, Turns, build

NAN = math.nan
UIDS = list("aaaabbbbcccc")
HARD = [1, 0, 0, 1, 1, 1, 0.5, NAN, 0, 0, 0, 0]
EASY = [1, 1, 0, 0.25, 0, 1, 1, 1, 1, 0, NAN, 0.5]
COUNTS = [1, 0, 0, 0.25, 0, 1, 0, NAN, 0, 0, NAN, 0]
"""`EASY` where `HARD` reached 1."""
LENGTHS = [4, 2, 3, 1, 2, 2, 5, 3, 3, 3, 3, 1]
CONDITIONS = {"easy": {"on": "hard", "at_least": 1.0}}
REWARDS = {"keys": ["hard", "easy"], "weights": [2.0, 1.0], "conditions": CONDITIONS}
GRPO = {"compose": {"steps": ["weigh_and_sum", "centre", {"step": "scale_by_std", "epsilon": 1e-6}]}}
GDPO = {"gdpo": {"epsilon": 1e-6}}


def advantages(name: str, config: dict[str, Any], rows: list[tuple[float, ...]], uids: list[str], **more: Any) -> Any:
    settings = Settings.parse({"rewards": REWARDS} | config)
    batch = Batch.of(rows, uids, keys=("hard", "easy"), conditions=settings.rewards.conditions, **more)
    return build(name, settings)(batch).advantages


@pytest.mark.parametrize(
    ("name", "config", "wanted"),
    [
        (
            "compose",
            GRPO,
            [1.091409607, -0.848874139, -0.848874139, 0.60633867, 0, 0.999999, -0.999999, 0, 0, 0, 0, 0],
        ),
        (
            "gdpo",
            GDPO,
            [1.630551819, -1.22485583, -1.22485583, 0.819159841, 0.295590923, 1.182366762, -1.477957685, *[0.0] * 5],
        ),
        (
            "gdpo",
            {"gdpo": {"whiten": "token"}},
            [
                *(1.620343097, -1.036450079, -1.036450079, 0.865389362, 0.378238488, 1.203332587, -1.27194685, 0),
                *[0.103208075] * 4,
            ],
        ),
    ],
)
def test_the_numbers_are_those_of_the_step_that_0_3_0_had(name, config, wanted):
    found = advantages(name, config, list(zip(HARD, EASY, strict=True)), UIDS, lengths=LENGTHS)
    np.testing.assert_allclose(found, wanted, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "config", "wanted"),
    [
        ("compose", GRPO, [0.87287099, 0, -1.091088737, 0.218217747, -0.707106448, 0, 0, 0.707106448]),
        ("gdpo", GDPO, [0.589767999, 0, -1.31639098, 0.726622981, -1.083472404, 0, 0, 1.083472404]),
    ],
)
def test_by_turn_conditions_come_before_returns_with_the_numbers_of_0_3_0(name, config, wanted):
    hard, easy = [1, 1, 0, 1, 0, 0, 0, 1], [1, 2, 1, 0, 1, 2, 4, 1]
    turns = Turns.of_counts([2, 1, 1, 3, 1], (1,), 0.5)
    found = advantages(name, config, list(zip(hard, easy, strict=True)), list("ppppqqqq"), turns=turns)
    np.testing.assert_allclose(found, wanted, atol=1e-9)


@EVERY
def test_every_estimator_gets_the_rewards_that_count_and_the_accuracy_as_it_was_returned(name, config):
    """`easy` is the accuracy as well."""
    named = {"keys": ["hard", "easy"], "weights": [2.0, 1.0], "accuracy_key": "acc"}
    fields = {"hard": np.array(HARD), "easy": np.array(EASY), "acc": np.array(EASY)}
    found, wanted = (
        call(
            name,
            [0.0] * 12,
            UIDS,
            LENGTHS,
            config=config | {"rewards": named | conditions},
            components=fields | {"easy": np.array(easy)},
            state=started(config),
        )
        for conditions, easy in (({"conditions": CONDITIONS}, EASY), ({}, COUNTS))
    )
    np.testing.assert_array_equal(found.tensor, wanted.tensor)
    assert found.state == wanted.state
    assert found.metrics["reward/easy/raw_mean"] == np.nanmean(EASY)
    assert found.metrics["reward/easy/mean"] == np.nanmean(COUNTS)
    assert found.metrics["reward/easy/condition_met"] == 4 / 11


def test_the_kl_of_a_response_whose_reward_does_not_count_is_kept():
    settings = Settings.parse({"rewards": REWARDS, "use_kl_in_reward": True})
    kl = [0.0, -0.5]
    batch = Batch.of(
        [[0, 1], [0, 1]], "aa", keys=("hard", "easy"), conditions=settings.rewards.conditions, kl_reward=kl
    )
    assert build("drgrpo", settings)(batch).advantages.tolist() == [0.25, -0.25]
