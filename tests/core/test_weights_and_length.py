"""Weights that follow the variation of each reward, and length relative to the right answers of a prompt."""

from __future__ import annotations

import math

import numpy as np
import pytest

from verl_ext.core.batch import Batch
from verl_ext.core.steps import WeighByVariation
from verl_ext.core.totals import Shorten
from verl_ext.core.turns import Turns
from verl_ext.errors import ConfigurationError, DataError

NAN = math.nan


def weights(rewards, lowest=None, **more):
    keys = tuple("abc"[: len(rewards[0])])
    batch = Batch.of(rewards, list(range(len(rewards))), keys=keys, **more)
    return list(WeighByVariation(lowest).update(batch.returns, batch, None).metrics.values())


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


def shortened(rewards, lengths, accuracy, labels=None, weight=0.5, **more):
    batch = Batch.of([[r] for r in rewards], labels or ["p"] * len(rewards), lengths=lengths, accuracy=accuracy, **more)
    return Shorten(weight=weight).update(batch.returns, batch, None).values[:, 0].tolist()


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
