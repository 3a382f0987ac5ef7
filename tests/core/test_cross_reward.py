"""Steps that look at several rewards: what they are with one reward, at their limits, and with weights."""

import numpy as np
import pytest
from hypothesis import given

from tests.batches import Rollout, rollouts
from verl_ext import Center, Chain, WeightedSum
from verl_ext.core.batch import Batch
from verl_ext.core.cross_reward import ScaleByCommonStd, ScaleByCorrelation, SoftMin, WeightByDensity
from verl_ext.core.turns import Turns

AB = ("a", "b")


def advantages(rollout: Rollout, *steps, count: int | None = None, weights=None) -> np.ndarray:
    """Return the advantages of the steps after `center`, on the first `count` rewards."""
    return Chain((Center(), *steps), weights)(rollout.batch(count)).advantages


@given(rollout=rollouts(nan=False))
def test_a_single_reward_has_its_own_std_as_the_common_std_and_the_correlation_1(rollout):
    centered = advantages(rollout, WeightedSum(), count=1)
    std = np.sqrt(
        [np.mean([centered[j] ** 2 for j, uid in enumerate(rollout.uids) if uid == own]) for own in rollout.uids]
    )
    found = advantages(rollout, ScaleByCommonStd(), WeightedSum(), count=1)
    np.testing.assert_allclose(found * std, centered, atol=1e-12)
    found = advantages(rollout, ScaleByCorrelation(epsilon=0.25), WeightedSum(), count=1)
    np.testing.assert_allclose(found, centered / np.sqrt(1.25), atol=1e-12)


@pytest.mark.parametrize(
    ("step", "weights"),
    [(ScaleByCommonStd, (3.0, -0.5)), (ScaleByCorrelation, (2.0, -0.5)), (ScaleByCorrelation, (2.0, 0.0))],
)
@given(rollout=rollouts())
def test_a_weight_has_the_effect_of_a_factor_of_the_reward(step, weights, rollout):
    """With the common standard deviation, a factor of all weights has no effect."""
    pairs = zip(rollout.columns.items(), weights, strict=True)
    columns = {key: [weight * value for value in column] for (key, column), weight in pairs}
    weighted = Rollout(rollout.uids, columns, rollout.lengths, rollout.accuracy)
    wanted = advantages(weighted, step(), WeightedSum())
    found = advantages(rollout, step(), WeightedSum(), weights=weights)
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
    if step is ScaleByCommonStd:
        tenfold = tuple(10 * weight for weight in weights)
        found = advantages(rollout, step(), WeightedSum(), weights=tenfold)
        np.testing.assert_allclose(found, wanted, atol=1e-9)


@given(rollout=rollouts(nan=False))
def test_a_soft_minimum_lies_between_the_minimum_and_the_mean_and_reaches_both(rollout):
    batch = rollout.batch()
    mean, least = batch.returns.mean(axis=1), batch.returns.min(axis=1)
    small, usual, large = (SoftMin(k).apply(batch.returns, batch)[:, 0] for k in (1e-9, 1.0, 1e6))
    np.testing.assert_allclose(small, mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(large, least, rtol=1e-6, atol=1e-5)
    assert ((least <= usual) & (usual <= mean + 1e-12)).all()


def test_a_soft_minimum_uses_the_weights_of_a_rubric_but_not_those_of_the_rewards():
    """x = (1, 0) with the weights (0.75, -0.25): the second is negated, and the mean is weighted by 0.75 and 0.25.

    With a weight of 0 the criterion does not count.
    """
    keys = {"keys": ("rubric[0]", "rubric[1]"), "reward_of_column": ("rubric", "rubric")}
    factors = np.array([[0.75, -0.25], [0.75, -0.25], [1.0, 0.0]])
    batch = Batch.of([[1.0, 0.0], [0.0, 2.0], [1.0, 5.0]], list("ppq"), **keys, criterion_weights=factors)
    soft_minimum = SoftMin(k=2.0).apply(batch.returns, batch)[:, 0]
    first = -np.log(0.75 * np.exp(-2.0) + 0.25) / 2
    second = -np.log(0.75 + 0.25 * np.exp(4.0)) / 2
    np.testing.assert_allclose(soft_minimum, [first, second, 1.0], rtol=1e-12)
    weighted = batch.with_weights([-3.0])
    np.testing.assert_array_equal(SoftMin(k=2.0).apply(weighted.returns, weighted)[:, 0], soft_minimum)


@pytest.mark.parametrize(("often", "rarely", "weight"), [(9, 1, 3.0), (4, 2, 2**0.5), (30, 1, 5.0), (3, 0, 1.0)])
def test_the_weight_of_a_rare_reward_is_the_root_of_the_ratio_and_at_most_5(often, rarely, weight):
    rewards = [[sign, sign * (group < rarely)] for group in range(often) for sign in (1.0, -1.0)]
    labels = [group for group in range(often) for _ in range(2)]
    batch = Batch.of([*rewards, [1.0, 1.0]], [*labels, "alone"], keys=AB)
    result = WeightByDensity().transform(batch.returns, batch, None)
    assert result.metrics == pytest.approx({"weight/a": 1.0, "weight/b": weight})
    np.testing.assert_allclose(result.values, batch.returns * [1.0, weight])
    positive = WeightByDensity("positive").transform(batch.returns, batch, None).values
    np.testing.assert_array_equal(positive, np.where(batch.returns > 0, result.values, batch.returns))


def test_per_turn_the_density_counts_the_groups_of_each_turn():
    rewards = [[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    batch = Batch.of(rewards, ["p"] * 4, keys=AB, turns=Turns.of_counts([2, 2], columns=(0, 1)))
    assert batch.returns.tolist() == [[2, 0], [1, 0], [1, 1], [0, 0]]  # a varies at both turns, b at the first
    metrics = WeightByDensity().transform(batch.returns, batch, None).metrics
    assert metrics == pytest.approx({"weight/a": 1.0, "weight/b": 2**0.5})


@pytest.mark.parametrize(
    "steps",
    [
        (WeightByDensity("positive"), WeightedSum()),
        (ScaleByCommonStd(), WeightedSum()),
        (ScaleByCorrelation(), WeightedSum()),
        (SoftMin(),),
    ],
)
def test_a_zero_variance_group_is_exactly_0_before_whitening(steps):
    """d: but for rounding, o: alone, c: rewards that cancel but for rounding, of which a soft minimum is not 0."""
    rows = [[0.7, 0.1], [0.7 + 2**-24, 0.1], [9.0, 3.0], [0.1, 0.9], [0.3, 0.7], [0.6, 0.4], [1, 1], [0, 0]]
    batch = Batch.of(np.array(rows, np.float32), list("ddocccxx"), keys=AB)
    found = Chain((Center(), *steps))(batch).advantages
    assert (found != 0).tolist() == [False] * 3 + [steps == (SoftMin(),)] * 3 + [True] * 2
