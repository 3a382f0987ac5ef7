"""Steps that look at several rewards: with one reward, at their limits, and with weights.

tests/core/test_weight_by_density.py tests `weight_by_density`.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from tests import reference
from tests.batches import Rollout, rollouts
from verl_ext import Center, Chain, WeightedSum
from verl_ext.core.batch import Batch
from verl_ext.core.cross_reward import (
    ScaleByCommonStd,
    ScaleByCorrelation,
    SoftMin,
    WeightByDensity,
    WeightByVariation,
)
from verl_ext.core.turns import Turns
from verl_ext.errors import ConfigurationError, DataError

NAN = math.nan


def advantages(rollout: Rollout, *steps, count: int | None = None, weights=None) -> np.ndarray:
    """Return the advantages of the steps after `center`, on the first `count` rewards."""
    return Chain((Center(), *steps), weights)(rollout.batch(count)).advantages


@given(rollout=rollouts(nan=False))
def test_the_common_std_of_a_single_reward_is_its_own_std(rollout):
    """The standard deviation is the one with n, and a group with the standard deviation 0 stays 0."""
    centered = advantages(rollout, WeightedSum(), count=1)
    std = np.zeros(len(centered))
    for rows in reference.groups(rollout.uids).values():
        std[rows] = math.sqrt(np.mean(centered[rows] ** 2))

    scaled = advantages(rollout, ScaleByCommonStd(), WeightedSum(), count=1)

    np.testing.assert_allclose(scaled * std, centered, atol=1e-12)


@given(rollout=rollouts(nan=False))
def test_the_summed_correlation_of_a_single_reward_is_1(rollout):
    centered = advantages(rollout, WeightedSum(), count=1)
    scaled = advantages(rollout, ScaleByCorrelation(epsilon=0.25), WeightedSum(), count=1)
    np.testing.assert_allclose(scaled, centered / math.sqrt(1 + 0.25), atol=1e-12)


@pytest.mark.parametrize(
    ("step", "weights"),
    [
        (ScaleByCommonStd(), (3.0, -0.5)),
        (ScaleByCorrelation(), (2.0, -0.5)),
        (ScaleByCorrelation(), (2.0, 0.0)),
    ],
    ids=["common std", "correlation", "correlation, weight 0"],
)
@given(rollout=rollouts())
def test_a_weight_has_the_effect_of_a_factor_of_the_reward(step, weights, rollout):
    weight_a, weight_b = weights
    weighted_columns = {
        "a": [weight_a * reward for reward in rollout.columns["a"]],
        "b": [weight_b * reward for reward in rollout.columns["b"]],
    }
    weighted_rollout = replace(rollout, columns=weighted_columns)

    from_weights = advantages(rollout, step, WeightedSum(), weights=weights)
    from_factors = advantages(weighted_rollout, step, WeightedSum())

    np.testing.assert_allclose(from_weights, from_factors, rtol=1e-9, atol=1e-9)


@given(rollout=rollouts())
def test_a_common_factor_of_all_weights_has_no_effect_on_the_common_std(rollout):
    once = advantages(rollout, ScaleByCommonStd(), WeightedSum(), weights=(3.0, -0.5))
    tenfold = advantages(rollout, ScaleByCommonStd(), WeightedSum(), weights=(30.0, -5.0))
    np.testing.assert_allclose(tenfold, once, atol=1e-9)


def soft_minimum(k: float, batch: Batch) -> np.ndarray:
    """Return the soft minimum of the rewards of each response."""
    return SoftMin(k).apply(batch.returns, batch)[:, 0]


@given(rollout=rollouts(nan=False))
def test_a_soft_minimum_lies_between_minimum_and_mean_and_reaches_both(rollout):
    batch = rollout.batch()
    mean = batch.returns.mean(axis=1)
    minimum = batch.returns.min(axis=1)

    between = soft_minimum(1.0, batch)

    assert (minimum <= between).all()
    assert (between <= mean + 1e-12).all()
    np.testing.assert_allclose(soft_minimum(1e-9, batch), mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(soft_minimum(1e6, batch), minimum, rtol=1e-6, atol=1e-5)


def test_a_soft_minimum_uses_rubric_weights_but_not_reward_weights():
    """With the weights 0.75 and -0.25, the second criterion is negated, and its weight in the mean is 0.25.

    With a weight of 0 the criterion does not count.
    """
    rewards = [[1.0, 0.0], [0.0, 2.0], [1.0, 5.0]]
    weights_of_criteria = np.array([[0.75, -0.25], [0.75, -0.25], [1.0, 0.0]])
    columns = {"keys": ("rubric[0]", "rubric[1]"), "reward_of_column": ("rubric", "rubric")}
    batch = Batch.of(rewards, list("ppq"), **columns, criterion_weights=weights_of_criteria)
    mean_of_first = 0.75 * math.exp(-2 * 1) + 0.25 * math.exp(-2 * 0)
    mean_of_second = 0.75 * math.exp(-2 * 0) + 0.25 * math.exp(-2 * -2)
    first = -math.log(mean_of_first) / 2
    second = -math.log(mean_of_second) / 2
    third = 1.0

    np.testing.assert_allclose(soft_minimum(2.0, batch), [first, second, third], rtol=1e-12)
    np.testing.assert_array_equal(soft_minimum(2.0, batch.with_weights([-3.0])), soft_minimum(2.0, batch))


def float32_groups() -> Batch:
    """Return groups that are constant, alone, cancel, or vary: `d`, `o`, `c` and `x`, rounded to float32."""
    constant = [[0.7, 0.1], [0.7 + 2**-24, 0.1]]
    alone = [[9.0, 3.0]]
    canceling = [[0.1, 0.9], [0.3, 0.7], [0.6, 0.4]]
    varying = [[1, 1], [0, 0]]
    rewards = np.array([*constant, *alone, *canceling, *varying], np.float32)
    return Batch.of(rewards, list("ddocccxx"), keys=("a", "b"))


@pytest.mark.parametrize(
    ("steps", "canceling_is_0"),
    [
        ((WeightByDensity("positive"), WeightedSum()), True),
        ((ScaleByCommonStd(), WeightedSum()), True),
        ((ScaleByCorrelation(), WeightedSum()), True),
        ((SoftMin(),), False),  # the soft minimum of rewards that cancel varies
    ],
    ids=["density", "common std", "correlation", "soft minimum"],
)
def test_a_zero_variance_group_is_exactly_0_before_whitening(steps, canceling_is_0):
    advantages = Chain((Center(), *steps))(float32_groups()).advantages
    is_zero = (advantages == 0).tolist()
    assert is_zero == [True, True, True, *[canceling_is_0] * 3, False, False]


def variation_weights(rewards, min_values=None, **options) -> list[float]:
    """Return the weight of each reward by `weight_by_variation`, with the minimum 0 by default."""
    keys = "abc"[: len(rewards[0])]
    batch = Batch.of(rewards, list(range(len(rewards))), keys=tuple(keys), **options)
    step = WeightByVariation(min_values or (0.0,) * len(keys))
    metrics = step.transform(batch.returns, batch, None).metrics
    return [metrics[f"weight/{key}"] for key in keys]


@pytest.mark.parametrize(
    ("rewards", "weights"),
    [
        pytest.param([[0.2, 0.0, NAN], [0.2, 1.0, NAN]], [0, 3, 0], id="one of three varies"),
        pytest.param([[0.2, 0.7], [0.2, 0.7]], [0, 0], id="none varies"),
        pytest.param([[5.0], [1.0]], [1], id="single reward"),
        pytest.param([[5.0, NAN]], [0, 0], id="single response"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_reward_without_variance_or_scores_has_variation_weight_0(rewards, weights):
    assert variation_weights(rewards) == pytest.approx(weights)


def test_per_turn_the_variation_weights_are_computed_from_whole_returns():
    """Two responses of 2 and 1 turns. The returns of the per-turn reward `a` are 1 + 3 and 2, and `b` is 0 and 1."""
    turns = Turns.of_counts([2, 1], columns=(0,))
    per_turn = variation_weights([[1.0, 0.0], [3.0, 0.0], [2.0, 1.0]], turns=turns)
    per_response = variation_weights([[4.0, 0.0], [2.0, 1.0]])
    assert per_turn == pytest.approx(per_response)


def test_a_reward_below_its_minimum_is_rejected():
    with pytest.raises(DataError, match="'b'"):
        variation_weights([[0.0, -1.0], [1.0, 1.0]])


def test_a_reward_that_float32_rounds_below_its_minimum_is_accepted():
    assert float(np.float32(-183.1)) < -183.1
    assert variation_weights([[np.float32(-183.1), 0.0], [0.0, 1.0]], (-183.1, 0.0))


def test_each_reward_needs_a_minimum():
    with pytest.raises(ConfigurationError, match="min_values"):
        variation_weights([[0.0, 1.0]], (0.0,))
