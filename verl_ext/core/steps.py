"""Steps on each reward and within groups, and the sum; `totals` has those after it.

Values are `[N, K]`; NaN means "not scored" and passes through every step.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import COMPARED, Order, Step, StepResult
from verl_ext.core.groups import TOLERANCE, Array, Bools, Groups, divide
from verl_ext.core.metrics import metric_name
from verl_ext.core.typed import bounded
from verl_ext.errors import ConfigurationError, DataError, listed

# What divisions within a group must not come after. A step that multiplies whole groups belongs here: dividing by the
# group's own mean or spread cancels its factor, in the rewards and in their sum.
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
    "dividing within the group afterwards undoes it",
)
# What they undo unless a sum stands between. A step, or a setting that is True, that scales each reward belongs here:
# dividing their sum keeps how they compare. A step that adds, clips or compares, such as `length_penalty`, is in
# neither.
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
    "dividing afterwards undoes it",
)


UNITS = 4.0
"""Units in the last place of float32 that the rounding of a reward is taken to explain."""


@dataclass(frozen=True)
class DivideByMean(Step):
    """`x / (mean_g(x) + epsilon)` of rewards of at least 0, before they are centered (MaxRL).

    All of a group is 0 if its mean is 0 or its values do not vary.
    """

    name: ClassVar[str] = "divide_by_mean"
    not_after: ClassVar[Order] = _GROUP_FACTORS
    undoes: ClassVar[Order] = _REWARD_FACTORS
    epsilon: float = bounded(1e-6, above=0.0)
    """Added to the mean."""

    def apply(self, values: Array, batch: Batch) -> Array:
        if (negative := values < -TOLERANCE).any():
            row, column = np.argwhere(negative)[0]
            raise DataError(
                f"{self.name} (maxrl) needs rewards of at least 0, found {values[row, column]:g} for uid "
                f"{batch.prompts.labels[batch.prompts.ids[row]]!r}: map them in the reward function, for example from "
                "[-1, 1] to [0, 1], use no negative weight, and center afterwards"
            )
        mean, varies = batch.groups.variation(values)
        scale: Array = np.divide(1.0, mean + self.epsilon, out=np.zeros(mean.shape), where=varies & (mean > 0))
        return values * batch.groups.broadcast(scale)


@dataclass(frozen=True)
class DivideByBatchStd(Step):
    """`x / (std(x) + epsilon)` before centering, std with n - 1 over the whole batch (Lite PPO).

    A reward whose std is at most `1e-6 max(1, |mean|)` is not divided. By turn each response counts once: each of its T
    turns has weight 1 / T.
    """

    name: ClassVar[str] = "divide_by_batch_std"
    divides_by_std: ClassVar[bool] = True
    not_after: ClassVar[Order] = {COMPARED: "it takes rewards as they are", "balance": "it undoes that factor"}
    undoes: ClassVar[Order] = {"weight_by_variation": "dividing by the batch's std undoes it"}
    not_with_rubrics: ClassVar[str] = "it would divide by the std of a criterion's place in the list"
    epsilon: float = bounded(0.0, low=0.0)

    def apply(self, values: Array, batch: Batch) -> Array:
        weights = np.apply_along_axis(batch.turns.response_weights, 0, ~np.isnan(values))
        count = weights.sum(axis=0).round(6)  # thirds add up to a whole number only up to rounding
        mean = divide(np.nansum(weights * values, axis=0), count)
        std = np.sqrt(divide(np.nansum(weights * np.square(values - mean), axis=0), count - 1))
        return values / np.where(std > TOLERANCE * np.maximum(1.0, np.abs(mean)), std + self.epsilon, 1.0)


@dataclass(frozen=True)
class Center(Step):
    """`x - mean_g(x)`, in a chain exactly 0 in a group without variance and in a group of one.

    A group whose range is at most `1e-6 max(1, |mean|)` has no variance. With `leave_one_out` the mean is that of the
    other responses: `n / (n - 1) (x - mean_g(x))`, with n scored responses in the group (RLOO).
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
    """`x / (std_g(x) + epsilon)` of centered values, std with n - 1; 0 where the divisor is 0."""

    name: ClassVar[str] = "scale_by_std"
    divides_by_std: ClassVar[bool] = True
    after: ClassVar[Order] = {"center": "it divides values that are centered in their group"}
    not_after: ClassVar[Order] = _GROUP_FACTORS
    undoes: ClassVar[Order] = _REWARD_FACTORS
    epsilon: float = bounded(0.0, low=0.0)
    """With more than 0, rewards of different scale that should cancel leave a rest."""

    def apply(self, values: Array, batch: Batch) -> Array:
        spread = batch.groups.std(values) + self.epsilon
        scaled: Array = values / batch.groups.broadcast(np.where(spread == 0, 1.0, spread))
        return scaled


@dataclass(frozen=True)
class ScaleByMad(ScaleByStd):
    """`n_g x / (sum_g |x| + epsilon)` of centered values: divided by the mean absolute deviation (DGPO, DGAE)."""

    name: ClassVar[str] = "scale_by_mad"

    def apply(self, values: Array, batch: Batch) -> Array:
        deviations, count = batch.groups.sum(np.abs(values)), batch.groups.count(values)
        scale: Array = np.divide(count, deviations + self.epsilon, out=np.zeros(count.shape), where=deviations > 0)
        return values * batch.groups.broadcast(scale)


@dataclass(frozen=True)
class DropConflicts(Step):
    """Leave out the responses whose `w_k x_k` conflict; multiply the others by the share of their group that is kept.

    A response conflicts if one `w_k x_k` is positive and another negative; an `x_k` of at most 1e-6 in size is rounding
    and has no sign. `conflict=hard` drops every such response, `conflict=snr` those with
    `|sum_k w_k x_k| / (sum_k |w_k x_k| + 1e-8) < tau` (GD2PO). From here on a dropped response is not scored: whitening
    leaves it out, and its advantage is 0. A reward that has weight 0 or is not scored has no part in a conflict.
    `conflict_fraction` and `dropped_fraction` are shares of the scored responses.
    """

    name: ClassVar[str] = "drop_conflicts"
    after: ClassVar[Order] = {COMPARED: "only compared values say which way a reward pulls"}
    not_after: ClassVar[Order] = {"weighted_sum": "it compares the rewards of a response"}
    not_with_rubrics: ClassVar[str] = "with many criteria most responses conflict, and it would drop them"
    conflict: Literal["hard", "snr"] = "hard"
    """Which responses are dropped: `hard`, every one that conflicts; `snr`, those whose rewards nearly cancel."""
    tau: float = bounded(0.2, low=0.0, high=1.0, only_with={"conflict": ("snr",)})
    """The limit of `snr`; the authors train with 0.2, 0.5 and 0.8."""
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
    """`w_k x_k`, `w_k = K c_k / (sum_k c_k + 1e-8)`, `c_k = std(r_k - low_k) / (|mean(r_k - low_k)| + 1e-8)` (SAW).

    Mean and std (n - 1) are those of the reward `r_k` over the scored responses of the batch, whatever steps came
    before; by turn `r_k` is a response's whole return. `low_k` is the least value that reward k can have. A reward
    that does not vary has weight 0. `weight/<reward>` is w_k.

    >>> batch = Batch.of([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0]], ["g"] * 3, keys=("correctness", "format"))
    >>> step = WeightByVariation(min_values=(-3.0, 0.0))
    >>> {name: round(w, 3) for name, w in step.transform(batch.returns, batch, None).metrics.items()}
    {'weight/correctness': 0.732, 'weight/format': 1.268}
    """

    name: ClassVar[str] = "weight_by_variation"
    not_after: ClassVar[Order] = {"weighted_sum": "it weighs each reward, and would weigh the KL term"}
    not_with_rubrics: ClassVar[str] = "its weights would go by a criterion's place in the list"
    min_values: tuple[float, ...]
    """The least value of each reward, in the order of `algorithm.rewards.keys`."""

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
                f"reward {batch.keys[column]!r} is {rewards[row, column] + min_values[column]:g}, below {self.name}'s "
                f"lowest value of {min_values[column]:g}: set min_values to the least value that each reward can have"
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
    """`sum_k w_k x_k`, plus the KL part of the reward where the batch has one.

    A component that is not scored contributes 0. A row without a scored component is not scored. Where rewards cancel
    (see `without_rounding`), the sum is exactly 0.
    """

    name: ClassVar[str] = "weighted_sum"
    sums: ClassVar[bool] = True
    weights: tuple[float, ...] | None = None
    """One per component; default: 1 each."""
    kl_where_varying: bool = False
    """Leave the KL part out of groups whose sum does not vary."""

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
    """`[G]` the range that the rounding of rewards to float32 can give the sums of a group in which they cancel.

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
    """The values, and whether all groups are centered: groups without variance then get exactly 0.

    They are if the mean of each is 0, to within 1e-6 of the largest value of the batch, or of 1.
    """
    mean, varies = batch.groups.variation(values, rounding)
    if (np.abs(mean) > TOLERANCE * np.fmax.reduce(np.abs(values), axis=None, initial=1.0)).any():
        return values, False
    return np.where(batch.groups.broadcast(varies) | np.isnan(values), values, 0.0), True


def single(values: Array) -> Array:
    """`[N]` the single value of each trajectory."""
    if values.shape[1] != 1:
        raise ConfigurationError(f"this step takes one value per row, found {values.shape[1]}: put weighted_sum first")
    return values[:, 0]
