"""Steps after the sum, by hand: whitening over sequences and tokens, balance, difficulty, and the length penalty."""

import math

import numpy as np
import pytest

from tests.core.single_reward import transformed, values_after
from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain
from verl_ext.core.post_sum import Balance, LengthPenalty, WeightByDifficulty
from verl_ext.core.steps import Center, ScaleByMad, ScaleByStd, WeightedSum, Whiten
from verl_ext.core.turns import Turns

NAN = math.nan


@pytest.mark.parametrize("offset", [0.0, 0.7, 10000.7, 1e9 + 0.3, -1e12])
@pytest.mark.parametrize("scale", [(), (ScaleByStd(),), (ScaleByMad(),)], ids=["centered", "std", "mad"])
def test_a_zero_variance_group_stays_0_next_to_any_offset(offset, scale):
    """The other groups vary by a hundred thousandth of the offset, in 100 random batches."""
    random = np.random.default_rng(0)
    deviation = max(1.0, 1e-5 * abs(offset))
    chain = Chain((Center(), *scale, WeightedSum(), Whiten()))
    for _ in range(100):
        rewards = offset + deviation * random.normal(size=(12, 2))
        rewards[8:] = 0.3  # group c
        rewards[11] += 1e-8  # one float32 step

        result = chain(Batch.of(rewards, list("aaaaabbbcccc"), keys=("x", "y")))

        zero_variance = result.advantages[8:]
        assert zero_variance.tolist() == [0, 0, 0, 0]
        assert not np.signbit(zero_variance).any()
        assert (result.advantages[:8] != 0).any()
        assert result.metrics["whiten_shift"] == 0


@pytest.mark.parametrize("weight", [1.0, -1.0])
@pytest.mark.parametrize("whiten", [(), (Whiten(),)], ids=["centered", "whitened"])
def test_no_advantage_is_a_negative_zero(weight, whiten):
    chain = Chain((Center(), WeightedSum(), *whiten), (weight,))
    batch = Batch.of([[1.0], [1.0], [0.0], [2.0]], list("aabb"))

    of_zero_variance_group = chain(batch).advantages[:2]

    assert of_zero_variance_group.tolist() == [0, 0]
    assert not np.signbit(of_zero_variance_group).any()


@pytest.mark.parametrize(("relative_mean", "is_shifted"), [(0.9e-6, False), (1.1e-6, True), (-1.1e-6, True)])
@pytest.mark.parametrize(("largest", "scale"), [(0.5, 1.0), (1.0, 1.0), (100.0, 100.0)])
def test_whitening_tolerates_group_means_of_a_millionth_of_the_largest_value(relative_mean, is_shifted, largest, scale):
    """The limit is 1e-6 if no value is larger than 1, and 1e-4 if the largest value is 100.

    Whitening subtracts the mean unless every group is centered, and then moves the zero-variance group b away from 0.
    """
    mean = relative_mean * scale
    rewards = [largest + mean, -largest + mean, NAN, 0.0, 0.0]
    values = values_after(Whiten("sequence"), rewards, list("aaabb"))
    assert (values[3] != 0) == is_shifted


@pytest.mark.parametrize("over", ["sequence", "token"])
@pytest.mark.filterwarnings("error")
def test_whitening_of_one_value_is_zero(over):
    result = transformed(Whiten(over), [5.0, NAN])
    np.testing.assert_array_equal(result.values[:, 0], [0, NAN])
    assert result.metrics == {"whiten_shift": 5, "whiten_std": 0}


@pytest.mark.filterwarnings("error")
def test_whitening_over_no_tokens_does_not_change_values():
    result = transformed(Whiten("token"), [1.0, -1.0], lengths=[0, 0])
    assert result.values[:, 0].tolist() == [1, -1]
    assert result.metrics == {"whiten_shift": 0, "whiten_std": 0}


def test_rounding_is_relative_to_the_largest_absolute_value():
    """The mean 1500 is rounding noise compared with -2e9, and would not be compared with 1e9."""
    values = np.array([[-2e9], [1e9 + 2250.0], [1e9 + 2250.0]])
    result = Whiten().transform(values, Batch.of(values, ["a", "a", "a"]), None)
    assert result.metrics["whiten_shift"] == 0.0


@pytest.mark.parametrize(
    ("rewards", "zero_variance_fraction"), [([0.0, 0.0], 1.0), ([], 0.0)], ids=["zero variance", "empty batch"]
)
def test_without_a_valid_group_the_balance_factor_is_1(rewards, zero_variance_fraction):
    metrics = transformed(Balance("token"), rewards).metrics
    assert metrics == {"balance_z": 1.0, "zero_variance_fraction": zero_variance_fraction}


@pytest.mark.filterwarnings("error")
def test_at_a_low_temperature_only_the_hardest_prompt_has_weight():
    """The accuracies are 0.25 and 0.75. The number exp(-0.25 / 1e-4) alone would be 0 already."""
    step = WeightByDifficulty(1e-4)
    values = values_after(step, [1.0, -1.0, 1.0, -1.0], list("aabb"), accuracy=[0.5, 0.0, 1.0, 0.5])
    assert values.tolist() == [2, -2, 0, 0]


LENGTH_PENALTY = LengthPenalty(weight=0.5)


@pytest.mark.filterwarnings("error")
def test_a_response_without_a_score_or_without_tokens_is_not_compared_by_length():
    """The lengths of the correct responses that are compared are 4 and 6."""
    values = values_after(LENGTH_PENALTY, [NAN, 1, 1, 1], lengths=[1, 4, 6, 0], accuracy=[1, 1, 1, 1])
    np.testing.assert_array_equal(values, [NAN, 1, 0.5, 1])


def test_a_response_without_an_accuracy_is_not_compared_by_length():
    values = values_after(LENGTH_PENALTY, [1, 1, 1], lengths=[1, 4, 6], accuracy=[NAN, 1, 1])
    assert values.tolist() == [1, 1, 0.5]


def test_per_turn_the_length_penalty_is_received_at_the_last_turn():
    """The first response is longer, 3 + 1 tokens to 2. It loses 0.5 at its second turn, discounted at its first."""
    turns = Turns.of_counts([2, 1], discount=0.5)
    batch = Batch.of([[1], [1], [1]], ["p"] * 3, lengths=[3, 1, 2], accuracy=[1, 1, 1], turns=turns)
    returns = batch.returns[:, 0]
    assert returns.tolist() == [0.5, 1, 1]

    penalized = LENGTH_PENALTY.apply(batch.returns, batch)[:, 0]

    penalty = returns - penalized
    assert penalty.tolist() == [0.25, 0.5, 0]
