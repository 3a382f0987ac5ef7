"""Steps on each reward and within groups, and the weighted sum.

Steps that combine information across rewards are in `cross_reward`, and steps after the sum in `post_sum` and
`history`. Values are `[N, K]`. NaN means "not scored" and passes through every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.cancelling import rounding_range, zero_constant_groups
from verl_ext.core.chain import Step, StepResult
from verl_ext.core.groups import TOLERANCE, Array, Bools, Groups, divide, label_text
from verl_ext.core.metrics import Metrics, metric_name
from verl_ext.core.schema import bounded
from verl_ext.errors import ConfigurationError, DataError, listed


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
                f"{self.name} (maxrl) needs rewards of at least 0, found {values[row, column]:g} for "
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

    The standard deviation is the one with n - 1. With per-turn rewards each response counts once: each of its T turns
    has weight 1 / T.

    Edge case: a reward whose standard deviation is at most `1e-6 max(1, |mean|)` is not divided.
    """

    name: ClassVar[str] = "divide_by_batch_std"
    divides_by_std: ClassVar[bool] = True
    rescales_batch: ClassVar[bool] = True
    not_with_rubrics: ClassVar[str] = (
        "it would take the standard deviation over criteria of different prompts that share a place in the list"
    )
    epsilon: float = bounded(0.0, low=0.0)

    def apply(self, values: Array, batch: Batch) -> Array:
        # [N, K]: the rows of a response have weights that sum to 1
        weights = np.apply_along_axis(batch.turns.response_weights, 0, ~np.isnan(values))
        responses = weights.sum(axis=0).round(6)  # thirds add up to a whole number only up to rounding
        mean = divide(np.nansum(weights * values, axis=0), responses)
        squared_deviations = np.nansum(weights * np.square(values - mean), axis=0)
        std = np.sqrt(divide(squared_deviations, responses - 1))
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
class DropConflicts(Step):
    """Drop responses whose rewards `w_k x_k` conflict, and scale the others by the fraction kept (GD2PO).

    The rewards of a response conflict if one `w_k x_k` is positive and another one negative. `conflict=hard` drops
    every such response. `conflict=snr` drops those with `|sum_k w_k x_k| / (sum_k |w_k x_k| + 1e-8) < tau`. The
    remaining responses of a group are multiplied by the fraction of the group that is kept. A dropped response counts
    as not scored from here on: whitening excludes it, and its advantage is 0. The metrics `conflict_fraction` and
    `dropped_fraction` are fractions of the scored responses.

    Edge cases: an `x_k` with an absolute value of at most 1e-6 is treated as rounding and has no sign. A reward that
    has weight 0 or is not scored is ignored.
    """

    name: ClassVar[str] = "drop_conflicts"
    before_sum: ClassVar[bool] = True
    after_center: ClassVar[bool] = True
    reads_one_group: ClassVar[bool] = True
    not_with_rubrics: ClassVar[str] = "with many criteria most responses conflict and would be dropped"
    conflict: Literal["hard", "snr"] = "hard"
    """Responses to drop: `hard` drops every response with a conflict, `snr` only those whose rewards nearly cancel."""
    tau: float = bounded(0.2, low=0.0, high=1.0, only_with={"conflict": ("snr",)})
    """Threshold of `conflict=snr`: responses with a smaller ratio are dropped. The authors use 0.2, 0.5 and 0.8."""

    def transform(self, values: Array, batch: Batch, state: Any) -> StepResult:
        is_scored = ~np.isnan(values).all(axis=1)
        weighted = np.where(np.isnan(values), 0.0, values * batch.weights)
        signed = np.where(np.abs(values) > TOLERANCE, weighted, 0.0)
        has_positive = (signed > 0).any(axis=1)
        has_negative = (signed < 0).any(axis=1)
        in_conflict: Bools = np.logical_and(has_positive, has_negative)
        is_dropped = in_conflict
        if self.conflict == "snr":
            ratio = np.abs(weighted.sum(axis=1)) / (np.abs(weighted).sum(axis=1) + 1e-8)
            is_dropped = in_conflict & (ratio < self.tau)
        kept_fraction = batch.groups.mean(np.where(is_scored, ~is_dropped, np.nan))
        scaled = values * batch.groups.broadcast(kept_fraction)[:, None]
        metrics = {}
        if is_scored.any():
            metrics["conflict_fraction"] = float(in_conflict[is_scored].mean())
            metrics["dropped_fraction"] = float(is_dropped[is_scored].mean())
        return StepResult(np.where(is_dropped[:, None], np.nan, scaled), metrics=metrics)


@dataclass(frozen=True)
class WeightByVariation(Step):
    """Weight each reward by its coefficient of variation in the batch: `w_k x_k`, `w_k = K c_k / sum_l c_l` (SAW).

    `c_k = std(r_k - low_k) / (|mean(r_k - low_k)| + 1e-8)`, and 1e-8 is also added to the sum. `low_k` is the minimum
    of reward k. Mean and standard deviation (n - 1) are computed from the rewards `r_k` of the scored responses of the
    batch, independently of earlier steps. With per-turn rewards `r_k` is the whole return of a response. The metric
    `weight/<reward>` is w_k.

    Edge case: a reward with zero variance has weight 0.

    >>> batch = Batch.of([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0]], ["g"] * 3, keys=("correctness", "format"))
    >>> step = WeightByVariation(min_values=(-3.0, 0.0))
    >>> {name: round(w, 3) for name, w in step.transform(batch.returns, batch, None).metrics.items()}
    {'weight/correctness': 0.732, 'weight/format': 1.268}
    """

    name: ClassVar[str] = "weight_by_variation"
    before_sum: ClassVar[bool] = True
    not_with_rubrics: ClassVar[str] = (
        "it would compute one weight for criteria of different prompts that share a place in the list"
    )
    min_values: tuple[float, ...]
    """Minimum value of each reward, in the order of `algorithm.rewards.keys`."""

    def for_rewards(self, count: int) -> WeightByVariation:
        return replace(self, min_values=(0.0,) * count)

    @property
    def min_reward(self) -> float:
        return max(self.min_values, default=-math.inf)

    def transform(self, values: Array, batch: Batch, state: Any) -> StepResult:
        if len(self.min_values) != len(batch.keys):
            raise ConfigurationError(
                f"{self.name} needs one entry in min_values for each of the rewards {listed(batch.keys)}, found "
                f"{len(self.min_values)}. Set min_values=[...] with {len(batch.keys)} numbers."
            )
        above_minimum = self._above_minimum(batch)  # [responses, K]
        whole_batch = Groups.of(["batch"] * len(above_minimum))  # one group
        mean, varies = whole_batch.variation(above_minimum)
        std = whole_batch.std(above_minimum - mean)
        variation = np.where(varies, std / (np.abs(mean) + 1e-8), 0.0)  # [1, K], or [0, K] without responses
        weights = len(batch.keys) * variation / (variation.sum(axis=1, keepdims=True) + 1e-8)
        metrics = weight_metrics(batch.keys, weights.sum(axis=0))
        return StepResult(values * weights, metrics=metrics)

    def _above_minimum(self, batch: Batch) -> Array:
        """Return `[responses, K]` how far each response's reward is above its minimum; raise if it is below."""
        min_values = np.array(self.min_values)
        rewards = batch.response_rewards()
        below = rewards - min_values < -TOLERANCE * np.maximum(1.0, np.abs(min_values))
        if below.any():
            row, column = np.argwhere(below)[0]
            raise DataError(
                f"The reward {batch.keys[column]!r} is {rewards[row, column]:g}, which is below "
                f"its entry {min_values[column]:g} in min_values of {self.name}. Set min_values to the smallest value "
                "that each reward can have."
            )
        above_minimum: Array = rewards - min_values
        return above_minimum


@dataclass(frozen=True)
class WeightedSum(Step):
    """Sum the weighted rewards, `sum_k w_k x_k`, and add the KL term of the reward if the batch has one.

    Edge cases: a component that is not scored contributes 0. A row without a scored component is not scored. If the
    rewards of a group cancel (see `verl_ext.core.cancelling`), the sum is exactly 0.
    """

    name: ClassVar[str] = "weighted_sum"
    sums: ClassVar[bool] = True
    adds_kl: ClassVar[bool] = True
    reads_one_group: ClassVar[bool] = True

    def apply(self, values: Array, batch: Batch) -> Array:
        total = self._sum_of_rewards(values, batch)
        if batch.kl_reward is not None:
            total = total + self.kl_term(total, batch.kl_reward, batch)
        return total[:, None]

    def kl_term(self, total: Array, kl_reward: Array, batch: Batch) -> Array:
        """Return `[N]` the KL term to add to the sums of the rewards `[N]`."""
        return kl_reward

    def contributions(self, values: Array, batch: Batch) -> Array:
        return batch.key_sums(np.where(np.isnan(values), 0.0, values * batch.weights))

    def _sum_of_rewards(self, values: Array, batch: Batch) -> Array:
        """Return `[N]` the weighted sums, exactly 0 where the rewards of a group cancel."""
        unscored = np.isnan(values)
        scored = np.where(unscored, 0.0, values)
        if batch.weights.ndim == 1:
            total: Array = scored @ batch.weights
        else:
            total = (scored * batch.weights).sum(axis=1)
        total[unscored.all(axis=1)] = np.nan
        total, _ = zero_constant_groups(total, batch.groups, rounding_range(values, batch))
        return total


def weight_metrics(keys: Sequence[str], weights: Array) -> Metrics:
    """Return the metric `weight/<reward>` of each reward."""
    return {f"weight/{metric_name(key)}": float(weight) for key, weight in zip(keys, weights, strict=True)}


def single(values: Array, step: str) -> Array:
    """Return `[N]` the single value of each row. `step` is the name of the step that needs it."""
    if values.shape[1] != 1:
        raise ConfigurationError(
            f"The step {step!r} takes one value per row, found {values.shape[1]}. Put weighted_sum before {step}."
        )
    return values[:, 0]
