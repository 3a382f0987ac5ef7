"""Steps that combine information across rewards: weights, common divisors, and a soft minimum.

Values are `[N, K]`. NaN means "not scored" and passes through every step. With per-turn rewards a group consists of the
rows of one turn.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import COMPARED, Order, Step, StepResult
from verl_ext.core.groups import Array, divide
from verl_ext.core.metrics import metric_name
from verl_ext.core.schema import bounded
from verl_ext.core.steps import _GROUP_FACTORS

_OF_EACH: Order = {"weighted_sum": "it needs the separate rewards of a response"}


@dataclass(frozen=True)
class WeightByDensity(Step):
    """Give rewards that vary in few groups more weight: `w_k x_k`, `w_k = min(5, sqrt(max_l p_l / p_k))` (DARA).

    `p_k` is the fraction of groups in which reward k has nonzero variance. `of=positive` weights only values above 0,
    so that the mean of a group is no longer 0. The metric `weight/<reward>` is w_k. The weight of
    `algorithm.rewards.weights` multiplies w_k and does not affect p_k.

    Edge cases: `w_k = 1` for a reward with zero variance in every group. A group of one response has zero variance.

    >>> batch = Batch.of([[1.0, 1.0], [-1.0, -1.0], [1.0, 0.0], [-1.0, 0.0]], list("ggHH"), keys=("correct", "format"))
    >>> found = WeightByDensity(of="positive").transform(batch.returns, batch, None)
    >>> found.values.round(3).tolist(), {name: round(w, 3) for name, w in found.metrics.items()}
    ([[1.0, 1.414], [-1.0, -1.0], [1.0, 0.0], [-1.0, 0.0]], {'weight/correct': 1.0, 'weight/format': 1.414})
    """

    name: ClassVar[str] = "weight_by_density"
    not_with_rubrics: ClassVar[str] = (
        "it would compute one weight for criteria of different prompts that share a place in the list"
    )
    after: ClassVar[Order] = {COMPARED: "the signs of the rewards have a meaning only relative to the group"}
    not_after: ClassVar[Order] = _OF_EACH
    of: Literal["both", "positive"] = "both"
    """Values to weight: `both` weights all values, `positive` only values above 0."""

    def transform(self, values: Array, batch: Batch, state: Any) -> StepResult:
        varying = batch.groups.varies(values).sum(axis=0)
        ratio = np.divide(varying.max(), varying, out=np.ones(len(varying)), where=varying > 0)
        weights = np.minimum(5.0, np.sqrt(ratio))
        metrics = {f"weight/{metric_name(key)}": float(w) for key, w in zip(batch.keys, weights, strict=True)}
        weighed = (values > 0) | (self.of == "both")
        return StepResult(np.where(weighed, values * weights, values), metrics=metrics)


@dataclass(frozen=True)
class ScaleByCommonStd(Step):
    """Divide centered rewards by one divisor per group: `x_k / sum_l |w_l| std_g(x_l)`, std with n (DVAO).

    The divisor uses `|w_l|`, because a negative weight is equivalent to a positive weight on the negated reward.

    Edge cases: a reward with zero variance, or one that is not scored, adds 0 to the divisor. A group is exactly 0 if
    the divisor is at most 1e-8.

    >>> batch = Batch.of([[3.0, 1.0], [-3.0, 1.0], [0.0, -2.0], [0.0, 0.0]], list("gggg"), keys=("correct", "format"))
    >>> ScaleByCommonStd(weights=(1.0, 0.5)).apply(batch.returns, batch).round(3).tolist()
    [[1.097, 0.366], [-1.097, 0.366], [0.0, -0.732], [0.0, 0.0]]
    """

    name: ClassVar[str] = "scale_by_common_std"
    divides_by_std: ClassVar[bool] = True
    after: ClassVar[Order] = {"center": "it divides values that are centered in their group"}
    not_after: ClassVar[Order] = {**_GROUP_FACTORS, **_OF_EACH}
    undoes: ClassVar[Order] = {"leave_one_out": "a division within the group cancels the factor n / (n - 1)"}
    weights: tuple[float, ...] | None = None

    def apply(self, values: Array, batch: Batch) -> Array:
        variance = np.nan_to_num(batch.groups.mean(np.square(values)))
        divisor = (np.sqrt(variance) * np.abs(batch.weighed(self.weights, by_group=True))).sum(axis=1)
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
    after: ClassVar[Order] = {"center": "it correlates values that are centered in their group"}
    not_after: ClassVar[Order] = _OF_EACH
    weights: tuple[float, ...] | None = None
    epsilon: float = bounded(1e-6, above=0.0)

    def apply(self, values: Array, batch: Batch) -> Array:
        groups, signs = batch.groups, np.sign(batch.weighed(self.weights))
        units = divide(values, groups.broadcast(np.sqrt(groups.sum(np.square(values)))))
        total = (np.nan_to_num(units) * signs).sum(axis=1)
        correlations = groups.sum(np.square(total))  # the square of the sum has all pairs
        scaled: Array = values / groups.broadcast(np.sqrt(correlations + self.epsilon))[:, None]
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
    k: float = bounded(1.0, above=0.0)
    """Sharpness of the soft minimum: the minimum of the rewards for large values, their mean for small values."""

    def apply(self, values: Array, batch: Batch) -> Array:
        factors = np.broadcast_to(batch.weighed(None), values.shape)
        values = np.where(factors == 0, np.nan, values * np.sign(factors))
        weights = np.where(np.isnan(values), 0.0, np.abs(factors))
        least = np.fmin.reduce(values, axis=1, keepdims=True)
        lower = np.nansum(weights * np.expm1(-self.k * (values - least)), axis=1, keepdims=True)
        soft: Array = least - np.log1p(divide(lower, weights.sum(axis=1, keepdims=True))) / self.k
        return soft
