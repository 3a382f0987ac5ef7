"""Steps on each reward and within groups, and the weighted sum. Steps after the sum are in `totals`.

Values are `[N, K]`. NaN means "not scored" and passes through every step.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import COMPARED, Order, Step, StepResult
from verl_ext.core.groups import TOLERANCE, Array, Bools, Groups, divide, label_text
from verl_ext.core.metrics import metric_name
from verl_ext.core.schema import bounded
from verl_ext.errors import ConfigurationError, DataError, listed

# Steps that multiply whole groups by a factor. A division within the group must not follow them, because dividing by
# the group's own mean or standard deviation cancels the factor, in the rewards and in their sum.
_GROUP_FACTORS: Order = dict.fromkeys(
    (
        "balance",
        "drop_conflicts",
        "scale_by_common_std",
        "scale_by_correlation",
        "weight_by_difficulty",
        "weight_by_focal",
        "weight_by_history",
        "whiten",
    ),
    "a division within the group cancels the factor of each group",
)
# Steps, or boolean settings, that scale each reward. A division within the group cancels that scale unless the sum
# comes in between: dividing the sum keeps the ratio of the rewards. A step that adds, clips or compares, such as
# `length_penalty`, is in neither list.
_REWARD_FACTORS: Order = dict.fromkeys(
    (
        "divide_by_mean",
        "divide_by_batch_std",
        "leave_one_out",
        "scale_by_std",
        "scale_by_mad",
        "weight_by_density",
        "weight_by_variation",
    ),
    "a division within the group cancels the earlier scaling of each reward",
)


UNITS = 4.0
"""Differences of up to so many units in the last place of float32 are attributed to the rounding of rewards."""


@dataclass(frozen=True)
class DivideByMean(Step):
    """Divide by the group mean, before centering: `x / (mean_g(x) + epsilon)` (MaxRL).

    Edge cases: a negative reward is an error. A group is exactly 0 if its mean or its variance is 0.
    """

    name: ClassVar[str] = "divide_by_mean"
    not_after: ClassVar[Order] = _GROUP_FACTORS
    undoes: ClassVar[Order] = _REWARD_FACTORS
    epsilon: float = bounded(1e-6, above=0.0)
    """Constant added to the group mean."""

    def apply(self, values: Array, batch: Batch) -> Array:
        if (negative := values < -TOLERANCE).any():
            row, column = np.argwhere(negative)[0]
            label = batch.prompts.labels[batch.prompts.ids[row]]
            raise DataError(
                f"{self.name} (maxrl) needs rewards of at least 0, found {values[row, column]:g} for "
                f"{label_text(label)}. Return nonnegative rewards, for example by mapping [-1, 1] to [0, 1]. Use no "
                "negative weight, and center afterwards.",
                label=label,
            )
        mean, varies = batch.groups.variation(values)
        scale: Array = np.divide(1.0, mean + self.epsilon, out=np.zeros(mean.shape), where=varies & (mean > 0))
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
    not_after: ClassVar[Order] = {
        COMPARED: "it needs rewards that are not centered",
        "balance": "dividing by the batch's standard deviation cancels the factor of balance",
    }
    undoes: ClassVar[Order] = {
        "weight_by_variation": "dividing by the batch's standard deviation cancels the weights",
    }
    not_with_rubrics: ClassVar[str] = (
        "it would take the standard deviation over criteria of different prompts that share a place in the list"
    )
    epsilon: float = bounded(0.0, low=0.0)

    def apply(self, values: Array, batch: Batch) -> Array:
        weights = np.apply_along_axis(batch.turns.response_weights, 0, ~np.isnan(values))
        count = weights.sum(axis=0).round(6)  # thirds add up to a whole number only up to rounding
        mean = divide(np.nansum(weights * values, axis=0), count)
        std = np.sqrt(divide(np.nansum(weights * np.square(values - mean), axis=0), count - 1))
        return values / np.where(std > TOLERANCE * np.maximum(1.0, np.abs(mean)), std + self.epsilon, 1.0)


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
    after: ClassVar[Order] = {"center": "it divides values that are centered in their group"}
    not_after: ClassVar[Order] = _GROUP_FACTORS
    undoes: ClassVar[Order] = _REWARD_FACTORS
    epsilon: float = bounded(0.0, low=0.0)
    """Constant added to the divisor. With a nonzero value, rewards of different scale that cancel leave a residual."""

    def apply(self, values: Array, batch: Batch) -> Array:
        spread = batch.groups.std(values) + self.epsilon
        scaled: Array = values / batch.groups.broadcast(np.where(spread == 0, 1.0, spread))
        return scaled


@dataclass(frozen=True)
class ScaleByMad(ScaleByStd):
    """Divide centered values by the group's mean absolute deviation: `n_g x / (sum_g |x| + epsilon)` (DGPO, DGAE)."""

    name: ClassVar[str] = "scale_by_mad"

    def apply(self, values: Array, batch: Batch) -> Array:
        deviations, count = batch.groups.sum(np.abs(values)), batch.groups.count(values)
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
    after: ClassVar[Order] = {COMPARED: "the signs of the rewards have a meaning only relative to the group"}
    not_after: ClassVar[Order] = {"weighted_sum": "it compares the separate rewards of a response"}
    not_with_rubrics: ClassVar[str] = "with many criteria most responses conflict and would be dropped"
    conflict: Literal["hard", "snr"] = "hard"
    """Responses to drop: `hard` drops every response with a conflict, `snr` only those whose rewards nearly cancel."""
    tau: float = bounded(0.2, low=0.0, high=1.0, only_with={"conflict": ("snr",)})
    """Threshold of `conflict=snr`: responses with a smaller ratio are dropped. The authors use 0.2, 0.5 and 0.8."""
    weights: tuple[float, ...] | None = None
    """One per component; default: 1 each."""

    def transform(self, values: Array, batch: Batch, state: Any) -> StepResult:
        weights = batch.weighed(self.weights)
        scored = ~np.isnan(values).all(axis=1)
        parts = np.where(np.isnan(values), 0.0, values * weights)
        pulls = np.where(np.abs(values) > TOLERANCE, parts, 0.0)
        conflict: Bools = np.logical_and((pulls > 0).any(axis=1), (pulls < 0).any(axis=1))
        dropped = conflict
        if self.conflict == "snr":
            ratio = np.abs(parts.sum(axis=1)) / (np.abs(parts).sum(axis=1) + 1e-8)
            dropped = conflict & (ratio < self.tau)
        kept = batch.groups.mean(np.where(scored, ~dropped, np.nan))
        out = np.where(dropped[:, None], np.nan, values * batch.groups.broadcast(kept)[:, None])
        shares = {"conflict_fraction": conflict, "dropped_fraction": dropped}
        metrics = {name: float(rows[scored].mean()) for name, rows in shares.items() if scored.any()}
        return StepResult(out, metrics=metrics)


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
    not_after: ClassVar[Order] = {
        "weighted_sum": "it weights each reward separately, and the sum may include the KL term",
    }
    not_with_rubrics: ClassVar[str] = (
        "it would compute one weight for criteria of different prompts that share a place in the list"
    )
    min_values: tuple[float, ...]
    """Minimum value of each reward, in the order of `algorithm.rewards.keys`."""

    def transform(self, values: Array, batch: Batch, state: Any) -> StepResult:
        size, turns = len(batch.keys), batch.turns
        min_values = np.array(self.min_values)
        if len(min_values) != size:
            raise ConfigurationError(
                f"{self.name} needs one entry in min_values for each of the rewards {listed(batch.keys)}, found "
                f"{len(min_values)}. Set min_values=[...] with {size} numbers."
            )
        whole = np.isin(np.arange(size), turns.columns)
        rewards = np.where(whole, batch.returns[turns.number == 0], batch.returns[turns.last]) - min_values
        if (below := rewards < -TOLERANCE * np.maximum(1.0, np.abs(min_values))).any():
            row, column = np.argwhere(below)[0]
            raise DataError(
                f"The reward {batch.keys[column]!r} is {rewards[row, column] + min_values[column]:g}, which is below "
                f"its entry {min_values[column]:g} in min_values of {self.name}. Set min_values to the smallest value "
                "that each reward can have."
            )
        everything = Groups.of([()] * len(rewards))
        mean, varies = everything.variation(rewards)
        variation = np.where(varies, everything.std(rewards - mean) / (np.abs(mean) + 1e-8), 0.0)
        weights = size * variation / (variation.sum(axis=1, keepdims=True) + 1e-8)
        named = zip(batch.keys, weights.sum(axis=0), strict=True)
        metrics = {f"weight/{metric_name(key)}": float(weight) for key, weight in named}
        return StepResult(values * weights, metrics=metrics)


@dataclass(frozen=True)
class WeightedSum(Step):
    """Sum the weighted rewards, `sum_k w_k x_k`, and add the KL term of the reward if the batch has one.

    Edge cases: a component that is not scored contributes 0. A row without a scored component is not scored. If the
    rewards of a group cancel (see `without_rounding`), the sum is exactly 0.
    """

    name: ClassVar[str] = "weighted_sum"
    sums: ClassVar[bool] = True
    weights: tuple[float, ...] | None = None
    """One per component; default: 1 each."""
    kl_where_varying: bool = False
    """Whether the KL term is added only in groups whose sum of rewards has nonzero variance."""

    def apply(self, values: Array, batch: Batch) -> Array:
        weights = batch.weighed(self.weights)
        unscored = np.isnan(values)
        scored = np.where(unscored, 0.0, values)
        total: Array = scored @ weights if weights.ndim == 1 else (scored * weights).sum(axis=1)
        total[unscored.all(axis=1)] = np.nan
        weights = batch.weighed(self.weights, by_group=True)
        total, _ = without_rounding(total, batch, _rounding(values, weights, batch))
        if batch.kl_reward is not None:
            varies = batch.groups.broadcast(batch.groups.varies(total))
            total = total + np.where(varies | (not self.kl_where_varying), batch.kl_reward, 0.0)
        return total[:, None]

    def parts(self, values: Array, batch: Batch) -> Array:
        return batch.key_sums(np.where(np.isnan(values), 0.0, values * batch.weighed(self.weights)))


def _rounding(values: Array, weights: Array, batch: Batch) -> Array:
    """Return `[G]` the largest range of sums that float32 rounding can produce in a group whose rewards cancel exactly.

    Per reward the bound is `UNITS` units in the last place of float32 at the group's largest absolute value, times the
    scale of the steps before the sum and the weight. The rounding to float32 moves a reward by at most half a unit, and
    a difference of two rewards by one unit. The scale comes from the same rewards, which adds the error of their std.
    """
    groups, returns = batch.groups, batch.returns
    deviations = np.where(np.isnan(values), np.nan, returns - groups.broadcast(groups.mean(returns)))
    centered = values - groups.broadcast(groups.mean(values))  # a sum that comes first has values with offsets
    scale = divide(groups.sum(np.abs(centered)), groups.sum(np.abs(deviations)))
    largest = np.fmax.reduceat(np.abs(returns)[groups.order], groups.starts)
    unit = np.spacing(largest.astype(np.float32)).astype(np.float64)
    rounding: Array = UNITS * np.nansum(np.abs(weights) * scale * unit, axis=1)
    return rounding


def without_rounding(values: Array, batch: Batch, rounding: Array | float = 0.0) -> tuple[Array, bool]:
    """Return the values, and whether all groups are centered. If they are, zero-variance groups are set to exactly 0.

    The groups are centered if the absolute value of each group's mean is at most 1e-6 times the larger of 1 and the
    largest absolute value of the batch.
    """
    mean, varies = batch.groups.variation(values, rounding)
    if (np.abs(mean) > TOLERANCE * np.fmax.reduce(np.abs(values), axis=None, initial=1.0)).any():
        return values, False
    return np.where(batch.groups.broadcast(varies) | np.isnan(values), values, 0.0), True


def single(values: Array) -> Array:
    """Return `[N]` the single value of each row."""
    if values.shape[1] != 1:
        raise ConfigurationError(
            f"This step takes one value per row, found {values.shape[1]}. Put weighted_sum before this step."
        )
    return values[:, 0]
