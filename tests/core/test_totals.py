"""Whitening by hand: over sequences, over tokens, and what stays exactly zero. Weights of whole groups."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.core.columns import apply, column
from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain
from verl_ext.core.steps import Centre, ScaleByMad, ScaleByStd, WeighAndSum
from verl_ext.core.totals import Balance, WeighByDifficulty, Whiten

NAN = math.nan


@pytest.mark.parametrize("offset", [0.0, 0.7, 10000.7, 1e9 + 0.3, -1e12])
@pytest.mark.parametrize("scale", [(), (ScaleByStd(),), (ScaleByMad(),)], ids=["centred", "std", "mad"])
def test_a_group_without_variance_is_exactly_zero_whatever_the_offset_of_the_others(offset, scale):
    """Of 100 random batches each; the rewards vary by a hundred thousandth of the offset."""
    draw = np.random.default_rng(0)
    for _ in range(100):
        rewards = offset + max(1.0, 1e-5 * abs(offset)) * draw.normal(size=(12, 2))
        rewards[8:] = 0.3
        rewards[11] += 1e-8  # one float32 step
        batch = Batch.of(rewards, list("aaaaabbbcccc"), keys=("x", "y"))
        result = Chain((Centre(), *scale, WeighAndSum(), Whiten()))(batch)
        assert result.advantages[8:].tolist() == [0, 0, 0, 0]
        assert not np.signbit(result.advantages[8:]).any()
        assert (result.advantages[:8] != 0).any()
        assert result.metrics["whiten_shift"] == 0


@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_no_advantage_is_a_negative_zero(weight):
    batch = Batch.of([[1.0], [1.0], [0.0], [2.0]], list("aabb"))
    for steps in ((Centre(), WeighAndSum((weight,))), (Centre(), WeighAndSum((weight,)), Whiten())):
        found = Chain(steps)(batch).advantages
        assert found[:2].tolist() == [0, 0]
        assert not np.signbit(found[:2]).any()


@pytest.mark.parametrize(("mean", "shifted"), [(0.9e-6, False), (1.1e-6, True), (-1.1e-6, True)])
def test_a_group_is_centred_to_within_a_millionth_of_the_largest_value(mean, shifted):
    """1e-6 where no value is larger than 1, 1e-4 where one is 100."""
    for largest, size in ((0.5, 1.0), (1.0, 1.0), (100.0, 100.0)):
        values = np.array([largest, -largest, NAN, 0.0, 0.0]) + mean * size
        values[3:] = 0.0
        assert bool(apply(Whiten("sequence"), values, list("aaabb"))[3]) == shifted


@pytest.mark.parametrize("over", ["sequence", "token"])
@pytest.mark.filterwarnings("error")
def test_whitening_of_one_value_is_zero(over):
    update = Whiten(over).update(*column([5.0, NAN]), None)
    np.testing.assert_array_equal(update.values[:, 0], [0, NAN])
    assert update.metrics == {"whiten_shift": 5, "whiten_std": 0}


@pytest.mark.filterwarnings("error")
def test_whitening_over_no_tokens_leaves_values_alone():
    update = Whiten("token").update(*column([1.0, -1.0], lengths=[0, 0]), None)
    assert update.values[:, 0].tolist() == [1, -1]
    assert update.metrics == {"whiten_shift": 0, "whiten_std": 0}


def test_rounding_is_judged_by_the_largest_size_of_either_sign():
    # A mean of 1,500 is rounding beside -2e9, and would not be beside 1e9.
    values = np.array([[-2e9], [1e9 + 2250.0], [1e9 + 2250.0]])
    update = Whiten().update(values, Batch.of(values, ["a", "a", "a"]), None)
    assert update.metrics["whiten_shift"] == 0.0


@pytest.mark.parametrize(("values", "factor", "dead"), [([0.0, 0.0], 1.0, 1.0), ([], 1.0, 0.0)])
def test_where_no_group_varies_nothing_is_balanced(values, factor, dead):
    found = Balance("token").update(*column(values), None).metrics
    assert found == {"balance_z": factor, "dead_share": dead}


@pytest.mark.filterwarnings("error")
def test_difficulty_at_a_low_temperature_leaves_the_hardest_alone():
    """exp(-0.25 / 1e-4) alone would be 0 already."""
    values, batch = column([1.0, -1.0, 1.0, -1.0], list("aabb"), accuracy=[0.5, 0.0, 1.0, 0.5])
    assert WeighByDifficulty(1e-4).update(values, batch, None).values[:, 0].tolist() == [2, -2, 0, 0]
