"""What every step must guarantee: shapes, NaN, unchanged inputs, independence of the order of rows, state."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import Rollout, rollouts
from verl_ext.core import cross_reward, post_sum, step_lists, steps
from verl_ext.core.batch import Batch
from verl_ext.core.chain import Step, StepResult
from verl_ext.core.post_sum import WeightByHistory
from verl_ext.errors import DataError

VARIANTS = {
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
"""Variants of steps, each with the number of columns that it gets."""


def default_steps() -> dict[str, tuple[Step, int]]:
    """Return the steps that have no variant above, with their default settings and two columns."""
    kinds_with_variants = {type(step) for step, _ in VARIANTS.values()}
    return {name: (kind(), 2) for name, kind in step_lists.STEPS.items() if kind not in kinds_with_variants}


STEPS = VARIANTS | default_steps()
EVERY_STEP = pytest.mark.parametrize(("step", "columns"), STEPS.values(), ids=STEPS.keys())
WEIGHTS = st.sampled_from([(1.0, 1.0), (2.0, -0.5)])


def state_of(step: Step) -> dict[str, Any] | None:
    """Return a state in the middle of a run, in which the anchor differs from the mean accuracy of the batch."""
    if isinstance(step, WeightByHistory):
        window = [] if step.anchor == "fixed" else [0.2, 0.6, 0.4]
        return {"anchor": step.anchor, "value": 0.4, "window": window, "updates": 3}
    return None


def values_for(step: Step, columns: int, batch: Batch) -> np.ndarray:
    """Return the first columns of the rewards, or their absolute values if the step needs values of at least 0."""
    values = batch.rewards[:, :columns].copy()
    return np.abs(values) if step.needs_nonnegative else values


def transformed(step: Step, columns: int, rollout: Rollout, weights: tuple[float, ...]) -> StepResult:
    """Return the result of the step on a rollout."""
    batch = rollout.batch().with_weights(weights)
    values = values_for(step, columns, batch)
    return step.transform(values, batch, state_of(step))


def expected_unscored(step: Step, values: np.ndarray, result: np.ndarray) -> np.ndarray:
    """Return where the result of a step must be NaN.

    A sum is NaN only if no reward is scored. A step that drops responses may drop all rewards of a row.
    """
    is_unscored = np.isnan(values)
    if step.sums:
        return is_unscored.all(axis=1, keepdims=True)
    if isinstance(step, cross_reward.DropConflicts):
        is_dropped = np.isnan(result).all(axis=1, keepdims=True)
        return is_unscored | is_dropped
    return is_unscored


@EVERY_STEP
@given(rollout=rollouts(), weights=WEIGHTS)
@pytest.mark.filterwarnings("error")
def test_values_are_float64_and_nan_where_nothing_is_scored(step, columns, rollout, weights):
    values = values_for(step, columns, rollout.batch())
    result = transformed(step, columns, rollout, weights).values
    np.testing.assert_array_equal(np.isnan(result), expected_unscored(step, values, result))
    assert result.dtype == np.float64
    assert not np.isinf(result).any()


@EVERY_STEP
@given(rollout=rollouts(), weights=WEIGHTS)
@pytest.mark.filterwarnings("error")
def test_metrics_are_finite_floats(step, columns, rollout, weights):
    metrics = transformed(step, columns, rollout, weights).metrics
    for value in metrics.values():
        assert type(value) is float
        assert math.isfinite(value)


@EVERY_STEP
@given(rollout=rollouts(), weights=WEIGHTS)
def test_inputs_are_not_changed(step, columns, rollout, weights):
    """So a step returns the same result when it is applied to them again."""
    batch = rollout.batch().with_weights(weights)
    values = values_for(step, columns, batch)
    state = state_of(step)
    inputs = [values, batch.rewards, batch.lengths, batch.accuracy, batch.reward_weights]
    copies = [array.copy() for array in inputs]
    for array in inputs:
        array.setflags(write=False)

    first = step.transform(values, batch, state)
    second = step.transform(values, batch, state)

    for array, copy in zip(inputs, copies, strict=True):
        np.testing.assert_array_equal(array, copy)
    assert state == state_of(step)
    np.testing.assert_array_equal(first.values, second.values)
    assert first.state == second.state
    assert first.metrics == second.metrics


@EVERY_STEP
@given(rollout=rollouts(), weights=WEIGHTS, data=st.data())
def test_the_order_of_rows_does_not_matter(step, columns, rollout, weights, data):
    order = data.draw(st.permutations(range(len(rollout.uids))))
    result = transformed(step, columns, rollout, weights)
    reordered = transformed(step, columns, rollout.reordered(order), weights)
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
    cases = {name: (step, columns) for name, (step, columns) in STEPS.items() if getattr(step, attribute)}
    return pytest.mark.parametrize(("step", "columns"), cases.values(), ids=cases.keys())


def batch_of(rewards: np.ndarray, labels: str) -> Batch:
    """Return the batch of rewards `[N, K]` with one letter per response as its label."""
    keys = [f"reward_{column}" for column in range(rewards.shape[1])]
    return Batch.of(rewards, list(labels), keys=keys)


def random_batch(step: Step, columns: int) -> Batch:
    """Return three uneven groups of random rewards in [0, 1], centered in each group if the step needs it."""
    rewards = np.random.default_rng(0).random((12, columns))
    batch = batch_of(rewards, "aaaabbbbbccc")
    if step.needs_centered or step.after_center:
        rewards = steps.Center().apply(rewards, batch)
    return batch_of(rewards, "aaaabbbbbccc")


def constant_batch(reward: float, columns: int) -> Batch:
    """Return one group of three responses with the same rewards."""
    return batch_of(np.full((3, columns), reward), "aaa")


def values_after(step: Step, batch: Batch) -> np.ndarray:
    """Return the values after the step."""
    return step.transform(batch.returns, batch, None).values


@steps_that("reads_one_group")
def test_a_step_that_reads_one_group_ignores_the_other_groups(step, columns):
    all_groups = random_batch(step, columns)
    first_group = batch_of(all_groups.rewards[:4], "aaaa")
    np.testing.assert_allclose(values_after(step, all_groups)[:4], values_after(step, first_group), rtol=1e-12)


@steps_that("centers")
def test_a_step_that_centers_gives_each_group_the_mean_0(step, columns):
    batch = random_batch(step, columns)
    mean_of_group = batch.groups.mean(values_after(step, batch))
    np.testing.assert_allclose(mean_of_group, 0.0, atol=1e-12)


@steps_that("zero_without_variance")
def test_a_step_declared_zero_without_variance_is_zero(step, columns):
    assert not values_after(step, constant_batch(0.3, columns)).any()


@steps_that("rescales_batch")
def test_a_step_that_rescales_the_batch_has_one_factor_per_reward(step, columns):
    batch = random_batch(step, columns)
    factors = values_after(step, batch) / batch.returns
    assert (factors > 0).all()
    factor_of_reward = np.broadcast_to(factors[0], factors.shape)
    np.testing.assert_allclose(factors, factor_of_reward, rtol=1e-12)


@steps_that("needs_nonnegative")
def test_a_step_that_needs_nonnegative_values_rejects_negative_ones(step, columns):
    batch = constant_batch(-1.0, columns)
    with pytest.raises(DataError):
        values_after(step, batch)
