"""Weights that follow the variation of each reward, and length relative to the right answers of a prompt."""

from __future__ import annotations

import math

import numpy as np
import pytest

from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain
from verl_ext.core.lists import check_order
from verl_ext.core.steps import Centre, WeighAndSum, WeighByVariation
from verl_ext.core.totals import Shorten
from verl_ext.core.turns import Turns
from verl_ext.errors import ConfigurationError, DataError

NAN = math.nan


def weights(rewards, lowest=None, **more):
    keys = tuple("abc"[: len(rewards[0])])
    batch = Batch.of(rewards, list(range(len(rewards))), keys=keys, **more)
    return list(WeighByVariation(lowest).update(batch.returns, batch, None).metrics.values())


def test_weights_follow_std_over_mean():
    # a: mean 3, std 2; b: mean 1, std 1. c_a = 2/3, c_b = 1: weights 2 (2/3) / (5/3) and 2 / (5/3).
    assert weights([[1.0, 0.0], [3.0, 1.0], [5.0, 2.0]]) == pytest.approx([0.8, 1.2])
    # Above their least values -2 and 1, a has mean 5 and b mean 0: b's variation is 1 / 1e-8.
    assert weights([[1.0, 0.0], [3.0, 1.0], [5.0, 2.0]], (-2.0, -1.0)) == pytest.approx([2 * 0.4 / 0.9, 2 * 0.5 / 0.9])


@pytest.mark.filterwarnings("error")
def test_a_reward_that_does_not_vary_or_is_not_scored_has_no_weight():
    assert weights([[0.2, 0.0, NAN], [0.2, 1.0, NAN]]) == pytest.approx([0, 3, 0])
    assert weights([[0.2, 0.7], [0.2, 0.7]]) == [0, 0]
    assert weights([[5.0], [1.0]]) == pytest.approx([1])
    assert weights([[5.0, NAN]]) == [0, 0]


def test_weights_by_turn_are_those_of_whole_returns():
    # Two responses of 2 and 1 turns: a by turn has returns 1 + 3 and 2, b of the response 0 and 1.
    turns = Turns.of_counts([2, 1], columns=(0,))
    found = weights([[1.0, 0.0], [3.0, 0.0], [2.0, 1.0]], turns=turns)
    assert found == pytest.approx(weights([[4.0, 0.0], [2.0, 1.0]]))


def test_a_value_below_the_lowest_names_its_reward_and_one_value_a_reward_is_needed():
    with pytest.raises(DataError, match="'b'"):
        weights([[0.0, -1.0], [1.0, 1.0]])
    assert weights([[np.float32(-183.1), 0.0], [0.0, 1.0]], (-183.1, 0.0))
    with pytest.raises(ConfigurationError, match="lowest"):
        weights([[0.0, 1.0]], (0.0,))


@pytest.mark.parametrize(
    "steps",
    [
        (Centre(), WeighByVariation(), WeighAndSum()),
        (WeighByVariation(), WeighAndSum(), Shorten(weight=0.1), Centre()),
    ],
)
def test_both_go_into_lists_before_and_after_the_sum(steps):
    check_order(steps, "steps")


def shortened(rewards, lengths, accuracy, labels=None, weight=0.5, **more):
    batch = Batch.of([[r] for r in rewards], labels or ["p"] * len(rewards), lengths=lengths, accuracy=accuracy, **more)
    return Shorten(weight=weight).update(batch.returns, batch, None).values[:, 0].tolist()


def test_right_answers_lose_by_their_length_and_wrong_ones_nothing():
    assert shortened([1, 1, 1, 0], [2, 4, 6, 9], [1, 1, 1, 0]) == [1, 0.75, 0.5, 0]
    # One right answer, and right answers of one length, keep their values; so does an accuracy of half.
    assert shortened([1, 0, 0.5], [9, 2, 5], [1, 0, 0.5]) == [1, 0, 0.5]
    assert shortened([1, 1, 0], [4, 4, 1], [1, 1, 0]) == [1, 1, 0]
    # Each prompt for itself.
    assert shortened([1, 1, 1, 1], [1, 3, 10, 30], [1] * 4, ["p", "p", "q", "q"]) == [1, 0.5, 1, 0.5]


@pytest.mark.filterwarnings("error")
def test_what_is_not_scored_or_has_no_tokens_in_the_loss_sets_no_length():
    found = shortened([NAN, 1, 1, 1], [1, 4, 6, 0], [1, 1, 1, 1])
    assert math.isnan(found[0])
    assert found[1:] == [1, 0.5, 1]
    assert shortened([1, 1, 1], [1, 4, 6], [NAN, 1, 1]) == [1, 1, 0.5]


def test_by_turn_a_response_earns_it_at_its_last_turn():
    # 3 + 1 and 2 tokens: the longer response loses .5 at its second turn, discounted at its first.
    turns = Turns.of_counts([2, 1], discount=0.5)
    assert shortened([1, 1, 1], [3, 1, 2], [1, 1, 1], turns=turns) == [0.5 - 0.25, 1 - 0.5, 1]


def test_the_lengths_of_wrong_answers_and_a_weight_for_a_unit_change_nothing():
    draw = np.random.default_rng(0)
    for _ in range(100):
        accuracy, lengths = draw.integers(0, 2, 8).astype(float), draw.integers(1, 50, 8).astype(float)
        first = Chain((WeighAndSum(), Shorten(weight=0.3), Centre()))
        batch = Batch.of(accuracy[:, None], list("aaaabbbb"), lengths=lengths, accuracy=accuracy)
        other = Batch.of(
            accuracy[:, None], list("aaaabbbb"), lengths=np.where(accuracy, 7 * lengths + 3, 1), accuracy=accuracy
        )
        np.testing.assert_allclose(first(batch).advantages, first(other).advantages, atol=1e-12)
