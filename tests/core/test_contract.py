"""What every step must guarantee: shapes, NaN, unchanged inputs, independence of the order of rows, state."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import Rollout, rollouts
from verl_ext.core import cross_reward, post_sum, step_lists, steps
from verl_ext.core.batch import Batch
from verl_ext.core.history import WeightByHistory
from verl_ext.errors import DataError

# Each variant of a step, and the number of columns that it gets. Other steps have their defaults and get two rewards.
STEPS = {
    "center": (steps.Center(), 2),
    "center, leave one out": (steps.Center(leave_one_out=True), 2),
    "drop conflicts": (cross_reward.DropConflicts(), 2),
    "drop conflicts, snr": (cross_reward.DropConflicts("snr", 0.8), 2),
    "weight by variation": (cross_reward.WeightByVariation(min_values=(-10.0, -10.0)), 2),
    "weight by density": (cross_reward.WeightByDensity(), 2),
    "weight by density, positive": (cross_reward.WeightByDensity("positive"), 2),
    "scale by common std": (cross_reward.ScaleByCommonStd(), 2),
    "scale by correlation": (cross_reward.ScaleByCorrelation(), 2),
    "soft min": (cross_reward.SoftMin(k=0.5), 2),
    "weighted sum": (steps.WeightedSum(), 2),
    "length penalty": (post_sum.LengthPenalty(weight=0.5), 1),
    "whiten by sequences": (steps.Whiten("sequence"), 1),
    "whiten by tokens": (steps.Whiten("token"), 1),
    "balance by tokens": (post_sum.Balance("token"), 1),
    "balance by sequences": (post_sum.Balance("sequence"), 1),
    "weight by difficulty": (post_sum.WeightByDifficulty(), 1),
    "weight by focal": (post_sum.WeightByFocal(), 1),
    "weight by history, soft": (WeightByHistory("soft"), 1),
    "weight by history, window": (WeightByHistory("window"), 1),
    "weight by history, fixed": (WeightByHistory("fixed", fixed_anchor=0.3), 1),
}
KINDS = {type(step) for step, _ in STEPS.values()}
STEPS |= {name: (kind(), 2) for name, kind in step_lists.STEPS.items() if kind not in KINDS}
EVERY_STEP = pytest.mark.parametrize(("step", "columns"), STEPS.values(), ids=STEPS.keys())
WEIGHTS = st.sampled_from([(1.0, 1.0), (2.0, -0.5)])


def state_of(step):
    """Return a state in the middle of a run, in which the anchor differs from the mean accuracy of the batch."""
    if isinstance(step, WeightByHistory):
        window = [] if step.anchor == "fixed" else [0.2, 0.6, 0.4]
        return {"anchor": step.anchor, "value": 0.4, "window": window, "updates": 3}
    return None


def values_of(step, columns: int, batch: Batch) -> np.ndarray:
    values = batch.rewards[:, :columns].copy()
    return np.abs(values) if step.needs_nonnegative else values


def run(step, columns: int, rollout: Rollout, weights: tuple[float, ...]):
    batch = rollout.batch().with_weights(weights)
    values = values_of(step, columns, batch)
    return values, step.transform(values, batch, state_of(step))


@EVERY_STEP
@given(rollout=rollouts(), weights=WEIGHTS)
@pytest.mark.filterwarnings("error")
def test_values_are_float64_and_nan_where_nothing_is_scored_and_metrics_are_finite(step, columns, rollout, weights):
    values, result = run(step, columns, rollout, weights)
    missing = np.isnan(values)
    if step.sums:
        missing = missing.all(axis=1, keepdims=True)
    elif isinstance(step, cross_reward.DropConflicts):
        missing = missing | np.isnan(result.values).all(axis=1, keepdims=True)
    np.testing.assert_array_equal(np.isnan(result.values), missing)
    assert result.values.dtype == np.float64
    assert not np.isinf(result.values).any()
    assert all(type(value) is float and math.isfinite(value) for value in result.metrics.values())


@EVERY_STEP
@given(rollout=rollouts(), weights=WEIGHTS)
def test_inputs_are_not_changed(step, columns, rollout, weights):
    batch = rollout.batch().with_weights(weights)
    values = values_of(step, columns, batch)
    watched = [values, batch.rewards, batch.lengths, batch.accuracy, batch.reward_weights]
    before = [array.copy() for array in watched]
    for array in watched:
        array.setflags(write=False)
    state = state_of(step)
    first = step.transform(values, batch, state)
    for array, old in zip(watched, before, strict=True):
        np.testing.assert_array_equal(array, old)
    assert state == state_of(step)
    second = step.transform(values, batch, state)
    np.testing.assert_array_equal(first.values, second.values)
    assert first.state == second.state
    assert first.metrics == second.metrics


@EVERY_STEP
@given(rollout=rollouts(), weights=WEIGHTS, data=st.data())
def test_the_order_of_rows_does_not_matter(step, columns, rollout, weights, data):
    order = data.draw(st.permutations(range(len(rollout.uids))))
    _, result = run(step, columns, rollout, weights)
    _, reordered = run(step, columns, rollout.reordered(order), weights)
    np.testing.assert_allclose(reordered.values, result.values[order], rtol=1e-9, atol=1e-9)
    assert reordered.metrics == pytest.approx(result.metrics, rel=1e-9, abs=1e-9, nan_ok=False)


@EVERY_STEP
@pytest.mark.filterwarnings("error")
def test_an_empty_batch_gives_an_empty_result(step, columns):
    batch = Batch.of([], [], keys=("a", "b"), accuracy=[])
    result = step.transform(batch.rewards[:, :columns], batch, step.init())
    assert result.values.shape == (0, 1 if step.sums else columns)


def steps_that(attribute: str):
    """Parametrize a test with the steps that declare an attribute."""
    cases = {name: case for name, case in STEPS.items() if getattr(case[0], attribute)}
    return pytest.mark.parametrize(("step", "columns"), cases.values(), ids=cases.keys())


def batch_with_groups(step, columns: int, labels: str) -> Batch:
    """Return a batch of random rewards in [0, 1], centered in each group if the step needs it."""
    rewards = np.random.default_rng(0).random((len(labels), columns))
    batch = Batch.of(rewards, list(labels), keys=[f"reward_{column}" for column in range(columns)])
    if step.needs_centered or step.after_center:
        rewards = steps.Center().apply(rewards, batch)
    return Batch.of(rewards, list(labels), keys=batch.keys)


def values_after(step, batch: Batch) -> np.ndarray:
    return step.transform(batch.returns, batch, None).values


@steps_that("reads_one_group")
def test_a_step_that_reads_one_group_gives_the_same_values_without_the_other_groups(step, columns):
    whole = batch_with_groups(step, columns, "aaaabbbbbccc")
    alone = Batch.of(whole.rewards[:4], list("aaaa"), keys=whole.keys)
    np.testing.assert_allclose(values_after(step, whole)[:4], values_after(step, alone), rtol=1e-12)


@steps_that("centers")
def test_a_step_that_centers_gives_each_group_the_mean_0(step, columns):
    batch = batch_with_groups(step, columns, "aaaabbbbbccc")
    np.testing.assert_allclose(batch.groups.mean(values_after(step, batch)), 0.0, atol=1e-12)


@steps_that("zero_without_variance")
def test_a_step_that_is_zero_without_variance_gives_a_constant_group_0(step, columns):
    batch = Batch.of(np.full((3, columns), 0.3), ["a"] * 3, keys=[f"reward_{column}" for column in range(columns)])
    assert not values_after(step, batch).any()


@steps_that("rescales_batch")
def test_a_step_that_rescales_the_batch_multiplies_each_reward_by_one_positive_number(step, columns):
    batch = batch_with_groups(step, columns, "aaaabbbbbccc")
    factors = values_after(step, batch) / batch.returns
    assert (factors > 0).all()
    np.testing.assert_allclose(factors, factors[:1].repeat(len(factors), axis=0), rtol=1e-12)


@steps_that("needs_nonnegative")
def test_a_step_that_needs_nonnegative_values_rejects_negative_ones(step, columns):
    batch = Batch.of(np.full((3, columns), -1.0), ["a"] * 3, keys=[f"reward_{column}" for column in range(columns)])
    with pytest.raises(DataError):
        values_after(step, batch)
