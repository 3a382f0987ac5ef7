"""Whitening by hand: over sequences, over tokens, and what stays exactly zero. Weights and length."""

import math

import numpy as np
import pytest

from tests.core.columns import apply, column
from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain
from verl_ext.core.cross_reward import WeightByVariation
from verl_ext.core.post_sum import Balance, LengthPenalty, WeightByDifficulty
from verl_ext.core.steps import Center, ScaleByMad, ScaleByStd, WeightedSum, Whiten
from verl_ext.core.turns import Turns
from verl_ext.errors import ConfigurationError, DataError

NAN = math.nan


@pytest.mark.parametrize("offset", [0.0, 0.7, 10000.7, 1e9 + 0.3, -1e12])
@pytest.mark.parametrize("scale", [(), (ScaleByStd(),), (ScaleByMad(),)], ids=["centered", "std", "mad"])
def test_a_zero_variance_group_is_exactly_0_whatever_the_offset_of_the_others(offset, scale):
    """Of 100 random batches each; the rewards vary by a hundred thousandth of the offset."""
    draw = np.random.default_rng(0)
    for _ in range(100):
        rewards = offset + max(1.0, 1e-5 * abs(offset)) * draw.normal(size=(12, 2))
        rewards[8:] = 0.3
        rewards[11] += 1e-8  # one float32 step
        batch = Batch.of(rewards, list("aaaaabbbcccc"), keys=("x", "y"))
        result = Chain((Center(), *scale, WeightedSum(), Whiten()))(batch)
        assert result.advantages[8:].tolist() == [0, 0, 0, 0]
        assert not np.signbit(result.advantages[8:]).any()
        assert (result.advantages[:8] != 0).any()
        assert result.metrics["whiten_shift"] == 0


@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_no_advantage_is_a_negative_zero(weight):
    batch = Batch.of([[1.0], [1.0], [0.0], [2.0]], list("aabb"))
    for steps in ((Center(), WeightedSum()), (Center(), WeightedSum(), Whiten())):
        advantages = Chain(steps, (weight,))(batch).advantages
        assert advantages[:2].tolist() == [0, 0]
        assert not np.signbit(advantages[:2]).any()


@pytest.mark.parametrize(("mean", "shifted"), [(0.9e-6, False), (1.1e-6, True), (-1.1e-6, True)])
def test_a_group_is_centered_to_within_a_millionth_of_the_largest_value(mean, shifted):
    """1e-6 where no value is larger than 1, 1e-4 where one is 100."""
    for largest, size in ((0.5, 1.0), (1.0, 1.0), (100.0, 100.0)):
        values = np.array([largest, -largest, NAN, 0.0, 0.0]) + mean * size
        values[3:] = 0.0
        assert bool(apply(Whiten("sequence"), values, list("aaabb"))[3]) == shifted


@pytest.mark.parametrize("over", ["sequence", "token"])
@pytest.mark.filterwarnings("error")
def test_whitening_of_one_value_is_zero(over):
    result = Whiten(over).transform(*column([5.0, NAN]), None)
    np.testing.assert_array_equal(result.values[:, 0], [0, NAN])
    assert result.metrics == {"whiten_shift": 5, "whiten_std": 0}


@pytest.mark.filterwarnings("error")
def test_whitening_over_no_tokens_does_not_change_values():
    result = Whiten("token").transform(*column([1.0, -1.0], lengths=[0, 0]), None)
    assert result.values[:, 0].tolist() == [1, -1]
    assert result.metrics == {"whiten_shift": 0, "whiten_std": 0}


def test_rounding_is_relative_to_the_largest_absolute_value():
    # A mean of 1,500 is rounding beside -2e9, and would not be beside 1e9.
    values = np.array([[-2e9], [1e9 + 2250.0], [1e9 + 2250.0]])
    result = Whiten().transform(values, Batch.of(values, ["a", "a", "a"]), None)
    assert result.metrics["whiten_shift"] == 0.0


@pytest.mark.parametrize(("values", "factor", "dead"), [([0.0, 0.0], 1.0, 1.0), ([], 1.0, 0.0)])
def test_without_a_valid_group_the_balance_factor_is_1(values, factor, dead):
    found = Balance("token").transform(*column(values), None).metrics
    assert found == {"balance_z": factor, "zero_variance_fraction": dead}


@pytest.mark.filterwarnings("error")
def test_at_a_low_temperature_only_the_hardest_prompt_has_weight():
    """exp(-0.25 / 1e-4) alone would be 0 already."""
    values, batch = column([1.0, -1.0, 1.0, -1.0], list("aabb"), accuracy=[0.5, 0.0, 1.0, 0.5])
    assert WeightByDifficulty(1e-4).transform(values, batch, None).values[:, 0].tolist() == [2, -2, 0, 0]


def weights(rewards, min_values=(), **more):
    keys = tuple("abc"[: len(rewards[0])])
    batch = Batch.of(rewards, list(range(len(rewards))), keys=keys, **more)
    return list(
        WeightByVariation(min_values or (0.0,) * len(keys)).transform(batch.returns, batch, None).metrics.values()
    )


@pytest.mark.filterwarnings("error")
def test_a_reward_without_variance_or_without_scores_has_weight_0():
    assert weights([[0.2, 0.0, NAN], [0.2, 1.0, NAN]]) == pytest.approx([0, 3, 0])
    assert weights([[0.2, 0.7], [0.2, 0.7]]) == [0, 0]
    assert weights([[5.0], [1.0]]) == pytest.approx([1])
    assert weights([[5.0, NAN]]) == [0, 0]


def test_per_turn_the_weights_are_computed_from_whole_returns():
    # Two responses of 2 and 1 turns: a by turn has returns 1 + 3 and 2, b of the response 0 and 1.
    turns = Turns.of_counts([2, 1], columns=(0,))
    found = weights([[1.0, 0.0], [3.0, 0.0], [2.0, 1.0]], turns=turns)
    assert found == pytest.approx(weights([[4.0, 0.0], [2.0, 1.0]]))


def test_a_reward_below_its_minimum_is_rejected_and_each_reward_needs_a_minimum():
    with pytest.raises(DataError, match="'b'"):
        weights([[0.0, -1.0], [1.0, 1.0]])
    assert weights([[np.float32(-183.1), 0.0], [0.0, 1.0]], (-183.1, 0.0))
    with pytest.raises(ConfigurationError, match="min_values"):
        weights([[0.0, 1.0]], (0.0,))


def with_length_penalty(rewards, lengths, accuracy, labels=None, weight=0.5, **more):
    batch = Batch.of([[r] for r in rewards], labels or ["p"] * len(rewards), lengths=lengths, accuracy=accuracy, **more)
    return LengthPenalty(weight=weight).transform(batch.returns, batch, None).values[:, 0].tolist()


@pytest.mark.filterwarnings("error")
def test_a_response_without_a_score_or_without_tokens_in_the_loss_is_not_compared_by_length():
    found = with_length_penalty([NAN, 1, 1, 1], [1, 4, 6, 0], [1, 1, 1, 1])
    assert math.isnan(found[0])
    assert found[1:] == [1, 0.5, 1]
    assert with_length_penalty([1, 1, 1], [1, 4, 6], [NAN, 1, 1]) == [1, 1, 0.5]


def test_per_turn_a_response_receives_the_length_penalty_at_its_last_turn():
    # 3 + 1 and 2 tokens: the longer response loses .5 at its second turn, discounted at its first.
    turns = Turns.of_counts([2, 1], discount=0.5)
    assert with_length_penalty([1, 1, 1], [3, 1, 2], [1, 1, 1], turns=turns) == [0.5 - 0.25, 1 - 0.5, 1]
