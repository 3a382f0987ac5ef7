"""Conditions of `algorithm.rewards`: for every estimator, and what stays as it was returned."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.calls import call
from tests.estimators.every import EVERY, started
from tests.facts import facts
from verl_ext import Batch, ConfigurationError, Settings, build
from verl_ext.core.batch import Requirement

NAN = math.nan
UIDS = list("aaaabbbbcccc")
HARD = [1, 0, 0, 1, 1, 1, 0.5, NAN, 0, 0, 0, 0]
EASY = [1, 1, 0, 0.25, 0, 1, 1, 1, 1, 0, NAN, 0.5]
COUNTS = [1, 0, 0, 0.25, 0, 1, 0, NAN, 0, 0, NAN, 0]
"""`EASY` where `HARD` reached 1."""
LENGTHS = [4, 2, 3, 1, 2, 2, 5, 3, 3, 3, 3, 1]
CONDITIONS = {"easy": {"on": "hard", "at_least": 1.0}}
REWARDS = {"keys": ["hard", "easy"], "weights": [2.0, 1.0], "conditions": CONDITIONS}


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


@pytest.mark.parametrize("names", [("easi", "hard"), ("easy", "hart")])
def test_a_condition_on_what_is_no_reward_is_an_error_with_the_nearest_name(names):
    key, on = names
    with pytest.raises(ConfigurationError, match=facts("easy", "hard")):
        Batch.of([[0, 1]], "a", keys=("hard", "easy"), conditions={key: Requirement(on, 1.0)})
