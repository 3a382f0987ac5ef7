"""Steps that combine information across rewards: conflicts, weights, common divisors, and a soft minimum.

Values are `[N, K]`. NaN means "not scored" and passes through every step. With per-turn rewards a group consists of
turns of the same number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import Step, StepResult
from verl_ext.core.groups import TOLERANCE, Array, Bools, Groups, divide
from verl_ext.core.metrics import Metrics, metric_name
from verl_ext.core.schema import bounded
from verl_ext.errors import ConfigurationError, DataError, listed


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
        above_minimum = self._above_minimum(batch)  # [T, K]
        whole_batch = Groups.of(["batch"] * len(above_minimum))  # one group
        mean, varies = whole_batch.variation(above_minimum)
        std = whole_batch.std(above_minimum - mean)
        variation = np.where(varies, std / (np.abs(mean) + 1e-8), 0.0)  # [1, K], or [0, K] without responses
        weights = len(batch.keys) * variation / (variation.sum(axis=1, keepdims=True) + 1e-8)
        metrics = weight_metrics(batch.keys, weights.sum(axis=0))
        return StepResult(values * weights, metrics=metrics)

    def _above_minimum(self, batch: Batch) -> Array:
        """Return `[T, K]` how far each trajectory's reward is above its minimum; raise if it is below."""
        min_values = np.array(self.min_values)
        rewards = batch.trajectory_rewards()
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
class WeightByDensity(Step):
    """Give rewards that vary in few groups more weight: `w_k x_k`, `w_k = min(5, sqrt(max_l p_l / p_k))` (DARA).

    `p_k` is the fraction of groups in which reward k has nonzero variance. `variant=positive` weights only values
    above 0, so that the mean of a group is no longer 0. The metric `weight/<reward>` is w_k. The weight of
    `algorithm.rewards.weights` multiplies w_k and does not affect p_k.

    Edge cases: `w_k = 1` for a reward with zero variance in every group. A group of one response has zero variance.

    >>> batch = Batch.of([[1.0, 1.0], [-1.0, -1.0], [1.0, 0.0], [-1.0, 0.0]], list("ggHH"), keys=("correct", "format"))
    >>> found = WeightByDensity(variant="positive").transform(batch.returns, batch, None)
    >>> found.values.round(3).tolist(), {name: round(w, 3) for name, w in found.metrics.items()}
    ([[1.0, 1.414], [-1.0, -1.0], [1.0, 0.0], [-1.0, 0.0]], {'weight/correct': 1.0, 'weight/format': 1.414})
    """

    name: ClassVar[str] = "weight_by_density"
    before_sum: ClassVar[bool] = True
    after_center: ClassVar[bool] = True
    not_with_rubrics: ClassVar[str] = (
        "it would compute one weight for criteria of different prompts that share a place in the list"
    )
    variant: Literal["symmetric", "positive"] = "symmetric"
    """Values to weight: `symmetric` weights all values, `positive` only values above 0."""

    def transform(self, values: Array, batch: Batch, state: Any) -> StepResult:
        groups_that_vary = batch.groups.varies(values).sum(axis=0)  # [K]
        ratio = np.divide(
            groups_that_vary.max(),
            groups_that_vary,
            out=np.ones(len(groups_that_vary)),
            where=groups_that_vary > 0,
        )
        weights = np.minimum(5.0, np.sqrt(ratio))
        weighted = values * weights
        if self.variant == "positive":
            weighted = np.where(values > 0, weighted, values)
        return StepResult(weighted, metrics=weight_metrics(batch.keys, weights))


@dataclass(frozen=True)
class ScaleByCommonStd(Step):
    """Divide centered rewards by one divisor per group: `x_k / sum_l |w_l| std_g(x_l)`, std with n (DVAO).

    The divisor uses `|w_l|`, because a negative weight is equivalent to a positive weight on the negated reward.

    Edge cases: a reward with zero variance, or one that is not scored, adds 0 to the divisor. A group is exactly 0 if
    the divisor is at most 1e-8.

    >>> batch = Batch.of([[3.0, 1.0], [-3.0, 1.0], [0.0, -2.0], [0.0, 0.0]], list("gggg"), keys=("correct", "format"))
    >>> ScaleByCommonStd().apply(batch.returns, batch.with_weights([1.0, 0.5])).round(3).tolist()
    [[1.097, 0.366], [-1.097, 0.366], [0.0, -0.732], [0.0, 0.0]]
    """

    name: ClassVar[str] = "scale_by_common_std"
    divides_by_std: ClassVar[bool] = True
    before_sum: ClassVar[bool] = True
    needs_centered: ClassVar[bool] = True
    reads_one_group: ClassVar[bool] = True

    def apply(self, values: Array, batch: Batch) -> Array:
        variance = np.nan_to_num(batch.groups.mean(np.square(values)))  # [G, K]
        weighted_std = np.sqrt(variance) * np.abs(batch.group_weights)
        divisor = weighted_std.sum(axis=1)
        scale: Array = np.divide(1.0, divisor, out=np.zeros(divisor.shape), where=divisor > 1e-8)
        return values * batch.groups.broadcast(scale)[:, None]


@dataclass(frozen=True)
class ScaleByCorrelation(Step):
    """Divide centered rewards by their summed correlations: `x_k / sqrt(sum_lm rho_lm + epsilon)` (CorrGRPO).

    `rho_lm` is the correlation of `w_l x_l` and `w_m x_m` in the group. The sum is over all pairs, including `l = m`,
    where rho is 1. A negative weight changes the sign of a reward's correlations.

    Edge cases: a reward with zero variance or with weight 0 adds nothing to the sum. A response without a score adds
    nothing to rho. If rewards oppose each other, the divisor is small, but at least `sqrt(epsilon)`.

    >>> batch = Batch.of([[3.0, 0.5], [-3.0, -0.5], [0.0, 0.0]], list("ggg"), keys=("correct", "format"))
    >>> ScaleByCorrelation().apply(batch.returns, batch).round(3).tolist()  # rho is 1, the divisor 2
    [[1.5, 0.25], [-1.5, -0.25], [0.0, 0.0]]
    """

    name: ClassVar[str] = "scale_by_correlation"
    divides_by_std: ClassVar[bool] = True
    before_sum: ClassVar[bool] = True
    needs_centered: ClassVar[bool] = True
    reads_one_group: ClassVar[bool] = True
    epsilon: float = bounded(1e-6, above=0.0)

    def apply(self, values: Array, batch: Batch) -> Array:
        groups = batch.groups
        # In each group, a column of `units` has length 1, so that the product of two columns is their correlation.
        length = np.sqrt(groups.sum(np.square(values)))
        units = divide(values, groups.broadcast(length))
        signed_units = np.nan_to_num(units) * np.sign(batch.weights)
        # The square of the sum over rewards has the products of all pairs.
        summed_correlations = groups.sum(np.square(signed_units.sum(axis=1)))
        divisor = np.sqrt(summed_correlations + self.epsilon)
        scaled: Array = values / groups.broadcast(divisor)[:, None]
        return scaled


@dataclass(frozen=True)
class SoftMin(Step):
    """Combine the rewards of a response by a soft minimum: `-(1/k) ln(mean_j exp(-k x_j))` (RVPO).

    The result lies between the minimum of the rewards (large k) and their mean (small k). `algorithm.rewards.weights`
    have no effect. The mean of a group is not 0, because the soft minimum is below the mean where rewards differ. Each
    criterion of a rubric is included: a criterion with a negative weight is negated, and `mean_j` is weighted by the
    absolute values of the weights.

    Edge cases: a reward that is not scored is excluded. A reward with zero variance in its group is included as 0. A
    response without a scored reward is not scored.

    >>> batch = Batch.of([[1.0, 1.0, 0.0], [1.0, -1.0, np.nan], [1.0, np.nan, np.nan]], list("ggg"), keys=tuple("abc"))
    >>> SoftMin().apply(batch.returns, batch)[:, 0].round(3).tolist()
    [0.547, -0.434, 1.0]
    """

    name: ClassVar[str] = "soft_min"
    sums: ClassVar[bool] = True
    reads_one_group: ClassVar[bool] = True
    k: float = bounded(1.0, above=0.0)
    """Sharpness of the soft minimum: the minimum of the rewards for large values, their mean for small values."""

    def apply(self, values: Array, batch: Batch) -> Array:
        rubric_weights = np.broadcast_to(batch.rubric_weights, values.shape)
        values = np.where(rubric_weights == 0, np.nan, values * np.sign(rubric_weights))
        weights = np.where(np.isnan(values), 0.0, np.abs(rubric_weights))
        minimum = np.fmin.reduce(values, axis=1, keepdims=True)
        # mean_j exp(-k x_j) = exp(-k minimum) (1 + mean_j (exp(-k (x_j - minimum)) - 1)). With expm1 and log1p the
        # result keeps its digits for a small k, where exp(-k x_j) is close to 1.
        decrease = np.expm1(-self.k * (values - minimum))
        summed_decrease = np.nansum(weights * decrease, axis=1, keepdims=True)
        mean_decrease = divide(summed_decrease, weights.sum(axis=1, keepdims=True))
        soft_minimum: Array = minimum - np.log1p(mean_decrease) / self.k
        return soft_minimum


def weight_metrics(keys: Sequence[str], weights: Array) -> Metrics:
    """Return the metric `weight/<reward>` of each reward."""
    return {f"weight/{metric_name(key)}": float(weight) for key, weight in zip(keys, weights, strict=True)}
