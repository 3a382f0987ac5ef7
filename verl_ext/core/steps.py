"""Steps that normalize values, and the weighted sum: center, divide, sum, whiten.

Steps that combine information across rewards are in `cross_reward`. Steps after the sum that read accuracies, lengths
or the past are in `post_sum`. Values are `[N, K]`. NaN means "not scored" and passes through every step.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import Step, StepResult
from verl_ext.core.groups import TOLERANCE, Array, Groups, divide, label_text
from verl_ext.core.schema import bounded
from verl_ext.errors import ConfigurationError, DataError


@dataclass(frozen=True)
class DivideByMean(Step):
    """Divide by the group mean, before centering: `x / (mean_g(x) + epsilon)` (MaxRL).

    Edge cases: a negative reward is an error. A group is exactly 0 if its mean or its variance is 0.
    """

    name: ClassVar[str] = "divide_by_mean"
    zero_without_variance: ClassVar[bool] = True
    needs_nonnegative: ClassVar[bool] = True
    reads_one_group: ClassVar[bool] = True
    epsilon: float = bounded(1e-6, above=0.0)
    """Constant added to the group mean."""

    def apply(self, values: Array, batch: Batch) -> Array:
        negative = values < -TOLERANCE
        if negative.any():
            row, column = np.argwhere(negative)[0]
            label = batch.prompts.labels[batch.prompts.ids[row]]
            raise DataError(
                f"{self.name} needs rewards of at least 0, found {values[row, column]:g} for "
                f"{label_text(label)}. Return nonnegative rewards, for example by mapping [-1, 1] to [0, 1]. Use no "
                "negative weight, and center afterwards.",
                label=label,
            )
        mean, varies = batch.groups.variation(values)
        has_scale = varies & (mean > 0)
        scale: Array = np.divide(1.0, mean + self.epsilon, out=np.zeros(mean.shape), where=has_scale)
        return values * batch.groups.broadcast(scale)


@dataclass(frozen=True)
class DivideByBatchStd(Step):
    """Divide by the standard deviation over the batch, before centering: `x / (std(x) + epsilon)` (Lite PPO).

    The standard deviation is the one with n - 1. With per-turn rewards each response counts once: each of its n turns
    has weight 1 / n.

    Edge case: a reward whose standard deviation is at most `1e-6 max(1, |mean|)` is not divided.
    """

    name: ClassVar[str] = "divide_by_batch_std"
    divides_by_std: ClassVar[bool] = True
    rescales_batch: ClassVar[bool] = True
    not_with_rubrics: ClassVar[str] = (
        "it would take the standard deviation over criteria of different prompts that share a place in the list"
    )
    epsilon: float = bounded(0.0, low=0.0)
    """Constant added to the standard deviation."""

    def apply(self, values: Array, batch: Batch) -> Array:
        weights = batch.turns.trajectory_weights(~np.isnan(values))  # [N, K]
        trajectories = weights.sum(axis=0).round(6)  # thirds add up to a whole number only up to rounding
        mean = divide(np.nansum(weights * values, axis=0), trajectories)
        squared_deviations = np.nansum(weights * np.square(values - mean), axis=0)
        std = np.sqrt(divide(squared_deviations, trajectories - 1))
        varies = std > TOLERANCE * np.maximum(1.0, np.abs(mean))
        divisor = np.where(varies, std + self.epsilon, 1.0)
        return values / divisor


@dataclass(frozen=True)
class Center(Step):
    """Subtract the group mean as the baseline: `x - mean_g(x)`.

    With `leave_one_out` the baseline is the mean of the other responses: `n / (n - 1) (x - mean_g(x))`, with n scored
    responses in the group (RLOO).

    Edge cases: in a chain, a zero-variance group and a group of one response are exactly 0. A group has zero variance
    if its range is at most `1e-6 max(1, |mean|)`.
    """

    name: ClassVar[str] = "center"
    centers: ClassVar[bool] = True
    reads_one_group: ClassVar[bool] = True
    leave_one_out: bool = False
    """Whether the baseline of a response is the mean of the other responses."""

    def apply(self, values: Array, batch: Batch) -> Array:
        groups = batch.groups
        centered: Array = values - groups.broadcast(groups.mean(values))
        if self.leave_one_out:
            count = groups.count(values)
            centered = centered * groups.broadcast(divide(count, count - 1))
        return centered


@dataclass(frozen=True)
class ScaleByStd(Step):
    """Divide centered values by the group's standard deviation: `x / (std_g(x) + epsilon)`, std with n - 1.

    Edge case: the result is 0 where the divisor is 0.
    """

    name: ClassVar[str] = "scale_by_std"
    divides_by_std: ClassVar[bool] = True
    needs_centered: ClassVar[bool] = True
    reads_one_group: ClassVar[bool] = True
    epsilon: float = bounded(0.0, low=0.0)
    """Constant added to the divisor. With a nonzero value, rewards of different scale that cancel leave a residual."""

    def apply(self, values: Array, batch: Batch) -> Array:
        std = batch.groups.std(values) + self.epsilon
        divisor = np.where(std == 0, 1.0, std)
        scaled: Array = values / batch.groups.broadcast(divisor)
        return scaled


@dataclass(frozen=True)
class ScaleByMad(ScaleByStd):
    """Divide centered values by the group's mean absolute deviation: `n_g x / (sum_g |x| + epsilon)` (DGPO, DGAE)."""

    name: ClassVar[str] = "scale_by_mad"

    def apply(self, values: Array, batch: Batch) -> Array:
        deviations = batch.groups.sum(np.abs(values))
        count = batch.groups.count(values)
        scale: Array = np.divide(count, deviations + self.epsilon, out=np.zeros(count.shape), where=deviations > 0)
        return values * batch.groups.broadcast(scale)


@dataclass(frozen=True)
class WeightedSum(Step):
    """Sum the weighted rewards, `sum_k w_k x_k`, and add the KL term of the reward if the batch has one.

    Edge cases: a reward that is not scored contributes 0. A segment without a scored reward is not scored. If centered
    rewards of a group cancel up to the rounding of float32, the sum is exactly 0.
    """

    name: ClassVar[str] = "weighted_sum"
    sums: ClassVar[bool] = True
    adds_kl: ClassVar[bool] = True
    reads_one_group: ClassVar[bool] = True

    def apply(self, values: Array, batch: Batch) -> Array:
        unscored = np.isnan(values)
        scored = np.where(unscored, 0.0, values)
        total: Array = (scored * batch.weights).sum(axis=1)
        total[unscored.all(axis=1)] = np.nan
        # This sets rewards that cancel to 0. It changes nothing if no step before the sum has centered the rewards.
        total, _ = zero_constant_groups_if_centered(total, batch.groups, rounding_range(values, batch))
        if batch.kl_reward is not None:
            total = total + self.kl_term(total, batch.kl_reward, batch)
        return total[:, None]

    def contributions(self, values: Array, batch: Batch) -> Array:
        weighted = np.where(np.isnan(values), 0.0, values * batch.weights)
        return weighted if batch.criterion_weights is None else batch.reward_sums(weighted)

    def kl_term(self, total: Array, kl_reward: Array, batch: Batch) -> Array:
        """Return `[N]` the KL term to add to the sums of the rewards `[N]`."""
        return kl_reward


UNITS = 4.0
"""Differences of up to so many units in the last place of float32 are attributed to the rounding of rewards.

The rounding to float32 moves a reward by at most half a unit, and the difference of two rewards by one unit. The
standard deviation that scales the rewards is computed from the same rounded rewards, which adds to the error."""


def rounding_range(values: Array, batch: Batch) -> Array:
    """Return `[G]` the largest range of weighted sums that float32 rounding can produce if the rewards cancel exactly.

    Two rewards cancel in a group if their weighted sum is the same for each response. The group then has no learning
    signal, and its advantages must be 0. In floating point the sums differ by a little, because rewards arrive as
    float32. If the rewards cancel in every group, whitening divides by a standard deviation as small as the rounding,
    and makes noise as large as ordinary advantages.

    `values` `[N, K]` are the rewards after the steps before the sum. For each reward the bound is `UNITS` units in the
    last place at the largest absolute reward of the group, times the scale of those steps, times the absolute weight.

    Two rewards of three responses in one group, `a` rising and `b` falling by 0.1:

    >>> exact = [[1000.1, 1000.3], [1000.2, 1000.2], [1000.3, 1000.1]]
    >>> batch = Batch.of(np.float32(exact), ["g", "g", "g"], keys=("a", "b"))

    `center` and `scale_by_std` should make them (-1, 0, 1) and (1, 0, -1), whose sums are 0. The float32 numbers next
    to 1000 are 2^-14 = 0.000061 apart, so 1000.1 is stored as 1000.09998. After the division by the standard deviation
    0.1, the sums differ from 0 by up to 0.0004, which is far above the tolerance of 1e-6 for a group with zero
    variance:

    >>> scaled = ScaleByStd().apply(Center().apply(batch.returns, batch), batch)
    >>> sums = scaled.sum(axis=1, keepdims=True)
    >>> sums.round(5).tolist(), bool(batch.groups.varies(sums).any())
    ([[-0.0002], [0.00041], [-0.0002]], True)

    The scale of each reward is 1 / 0.1 = 10 and each weight is 1. Each reward adds 4 units x 0.000061 x 10 = 0.00244 to
    the bound, so both give 0.0049. The range of the sums is smaller, so the group is set to exactly 0:

    >>> rounding_range(scaled, batch).round(4)
    array([0.0049])
    >>> zero_constant_groups_if_centered(sums, batch.groups, rounding_range(scaled, batch))[0].tolist()
    [[0.0], [0.0], [0.0]]
    """
    groups = batch.groups
    unscored = np.isnan(values)  # a step may have dropped a response
    deviations = np.where(unscored, np.nan, batch.returns - groups.broadcast(groups.mean(batch.returns)))
    # The values have an offset if no step before the sum centers them.
    scaled_deviations = values - groups.broadcast(groups.mean(values))
    scale = divide(groups.sum(np.abs(scaled_deviations)), groups.sum(np.abs(deviations)))  # [G, K]
    largest_reward = np.fmax.reduceat(np.abs(batch.returns)[groups.order], groups.starts)  # [G, K]
    unit = np.spacing(largest_reward.astype(np.float32)).astype(np.float64)
    per_reward = np.abs(batch.group_weights) * scale * unit
    bound: Array = UNITS * np.nansum(per_reward, axis=1)
    return bound


def zero_constant_groups_if_centered(
    values: Array, groups: Groups, rounding: Array | float = 0.0
) -> tuple[Array, bool]:
    """Return the values, and whether all groups of the batch are centered.

    If all groups are centered, groups with zero variance are set to exactly 0. Otherwise, the values are unchanged.
    A group has zero variance if its range is at most `1e-6 max(1, |mean|)` or at most `rounding`.
    """
    mean, varies = groups.variation(values, rounding)
    if not means_are_zero(mean, values):
        return values, False
    is_kept = groups.broadcast(varies) | np.isnan(values)
    return np.where(is_kept, values, 0.0), True


def means_are_zero(mean_of_group: Array, values: Array) -> bool:
    """Return whether every group is centered: its mean is 0 up to rounding.

    The absolute value of each mean must be at most 1e-6 times the larger of 1 and the largest absolute value of the
    batch.
    """
    largest_value = np.fmax.reduce(np.abs(values), axis=None, initial=1.0)
    return not bool((np.abs(mean_of_group) > TOLERANCE * largest_value).any())


@dataclass(frozen=True)
class Whiten(Step):
    """Whiten over the whole batch, by sequences or by tokens: `(x - mean(x)) / (std(x) + epsilon)`.

    With `over="sequence"` every trajectory counts once, std with n - 1. If a trajectory has n turns, each turn counts
    1 / n. With `over="token"` every trajectory or turn counts once per token, and the divisor is `sqrt(var + 1e-8)`, as
    in verl's `masked_whiten`.

    With `over="sequence"` the mean is not subtracted if every group is centered, because it is then 0 up to rounding,
    and zero-variance groups stay 0. With per-turn rewards the mean is never subtracted, because it would depend on the
    decision to stop. With `over="token"` the mean is always subtracted, as in verl.
    """

    name: ClassVar[str] = "whiten"
    over: Literal["sequence", "token"] = "sequence"
    """Unit over which whitening averages: `sequence` (each response counts once) or `token`."""
    epsilon: float = bounded(1e-6, above=0.0, only_with={"over": ("sequence",)})
    """Constant added to the divisor with `over=sequence`."""

    def transform(self, values: Array, batch: Batch, state: Any) -> StepResult:
        values, all_centered = zero_constant_groups_if_centered(values, batch.groups)
        column = single(values, self.name)
        is_scored = ~np.isnan(column)
        weights = batch.lengths if self.over == "token" else batch.turns.trajectory_weights(is_scored)
        weights = weights[is_scored]
        scored = column[is_scored]
        total_weight = float(weights.sum().round(6))  # thirds add up to a whole number only up to rounding
        if total_weight == 0:
            return StepResult(values, metrics={"whiten_shift": 0.0, "whiten_std": 0.0})
        mean = 0.0
        if self.over == "token" or (batch.turns.one_per_trajectory and not all_centered):
            mean = float((weights * scored).sum()) / total_weight
        squared_deviations = float((weights * np.square(scored - mean)).sum())
        variance = squared_deviations / max(total_weight - 1, 1.0)
        std = math.sqrt(variance)
        divisor = math.sqrt(variance + 1e-8) if self.over == "token" else std + self.epsilon
        return StepResult((values - mean) / divisor, metrics={"whiten_shift": mean, "whiten_std": std})


def single(values: Array, step: str) -> Array:
    """Return `[N]` the single value of each segment. `step` is the name of the step that needs it."""
    if values.shape[1] != 1:
        raise ConfigurationError(
            f"The step {step!r} takes one value per row, found {values.shape[1]}. Put weighted_sum before {step}."
        )
    return values[:, 0]
