"""Steps that look at several rewards at once: weights and divisors that they share, and a sum that is a soft minimum.

Values are `[N, K]`; NaN means "not scored" and passes through every step. By turn a group has the rows of one turn.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import COMPARED, Order, Step, StepResult
from verl_ext.core.groups import Array, divide
from verl_ext.core.metrics import metric_name
from verl_ext.core.steps import _GROUP_FACTORS
from verl_ext.core.typed import bounded

_OF_EACH: Order = {"weighted_sum": "it compares the rewards of a response"}


@dataclass(frozen=True)
class WeightByDensity(Step):
    """`w_k x_k`, `w_k = min(5, sqrt(max_l p_l / p_k))`, p_k the share of groups in which reward k varies (DARA).

    A reward that varies in few groups counts more; `w_k = 1` for one that varies in none. `of=positive` weighs only
    what is above 0, and the mean of a group is then no longer 0. A group of one counts as one that does not vary.
    `weight/<reward>` is w_k; it is multiplied with the weight of `algorithm.rewards.weights`, which p_k does not know.

    >>> batch = Batch.of([[1.0, 1.0], [-1.0, -1.0], [1.0, 0.0], [-1.0, 0.0]], list("ggHH"), keys=("right", "form"))
    >>> found = WeightByDensity(of="positive").transform(batch.returns, batch, None)
    >>> found.values.round(3).tolist(), {name: round(w, 3) for name, w in found.metrics.items()}
    ([[1.0, 1.414], [-1.0, -1.0], [1.0, 0.0], [-1.0, 0.0]], {'weight/right': 1.0, 'weight/form': 1.414})
    """

    name: ClassVar[str] = "weight_by_density"
    not_with_rubrics: ClassVar[str] = "its density would go by a criterion's place in the list"
    after: ClassVar[Order] = {COMPARED: "only compared values say which responses are better than others"}
    not_after: ClassVar[Order] = _OF_EACH
    of: Literal["both", "positive"] = "both"

    def transform(self, values: Array, batch: Batch, state: Any) -> StepResult:
        varying = batch.groups.varies(values).sum(axis=0)
        ratio = np.divide(varying.max(), varying, out=np.ones(len(varying)), where=varying > 0)
        weights = np.minimum(5.0, np.sqrt(ratio))
        metrics = {f"weight/{metric_name(key)}": float(w) for key, w in zip(batch.keys, weights, strict=True)}
        weighed = (values > 0) | (self.of == "both")
        return StepResult(np.where(weighed, values * weights, values), metrics=metrics)


@dataclass(frozen=True)
class ScaleByCommonStd(Step):
    """`x_k / sum_l w_l std_g(x_l)` of centered values, std with n, one divisor for all rewards (DVAO).

    w_l is the size of the weight of reward l: a negative weight is a positive one of the negative reward. A reward that
    does not vary, or is not scored, adds 0 to the divisor. All of a group is 0 where the divisor is at most 1e-8.

    >>> batch = Batch.of([[3.0, 1.0], [-3.0, 1.0], [0.0, -2.0], [0.0, 0.0]], list("gggg"), keys=("right", "form"))
    >>> ScaleByCommonStd(weights=(1.0, 0.5)).apply(batch.returns, batch).round(3).tolist()
    [[1.097, 0.366], [-1.097, 0.366], [0.0, -0.732], [0.0, 0.0]]
    """

    name: ClassVar[str] = "scale_by_common_std"
    divides_by_std: ClassVar[bool] = True
    after: ClassVar[Order] = {"center": "it divides values that are centered in their group"}
    not_after: ClassVar[Order] = {**_GROUP_FACTORS, **_OF_EACH}
    undoes: ClassVar[Order] = {"leave_one_out": "dividing afterwards undoes it"}
    weights: tuple[float, ...] | None = None

    def apply(self, values: Array, batch: Batch) -> Array:
        variance = np.nan_to_num(batch.groups.mean(np.square(values)))
        divisor = (np.sqrt(variance) * np.abs(batch.weighed(self.weights, by_group=True))).sum(axis=1)
        scale: Array = np.divide(1.0, divisor, out=np.zeros(divisor.shape), where=divisor > 1e-8)
        return values * batch.groups.broadcast(scale)[:, None]


@dataclass(frozen=True)
class ScaleByCorrelation(Step):
    """`x_k / sqrt(sum_lm rho_lm + epsilon)`, rho the correlations of the centered `w_l x_l` in the group (CorrGRPO).

    The sum is over all pairs, also `l = m`, where rho is 1. A reward that does not vary or has weight 0 adds nothing,
    one with a negative weight has the opposite sign. Where a response lacks a score, it adds nothing to rho. Rewards
    that pull against each other make the divisor small, at least `sqrt(epsilon)`.

    >>> batch = Batch.of([[3.0, 0.5], [-3.0, -0.5], [0.0, 0.0]], list("ggg"), keys=("right", "form"))
    >>> ScaleByCorrelation().apply(batch.returns, batch).round(3).tolist()  # rho is 1, the divisor 2
    [[1.5, 0.25], [-1.5, -0.25], [0.0, 0.0]]
    """

    name: ClassVar[str] = "scale_by_correlation"
    divides_by_std: ClassVar[bool] = True
    after: ClassVar[Order] = {"center": "the correlations are those of values that are centered in their group"}
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
    """`-(1/k) ln(mean_j exp(-k x_j))` over the rewards of a response: between their mean and the least (RVPO).

    A large k gives the least, a small one the mean. A reward that is not scored is left out; one that does not vary in
    its group takes part with 0. A response without a scored reward is not scored. `algorithm.rewards.weights` have no
    effect. The mean of a group is not 0: where rewards differ, the sum is below their mean. Of a reward by item each
    criterion takes part; one with a negative weight counts as its opposite, and the mean is that of the weights' sizes.

    >>> batch = Batch.of([[1.0, 1.0, 0.0], [1.0, -1.0, np.nan], [1.0, np.nan, np.nan]], list("ggg"), keys=tuple("abc"))
    >>> SoftMin().apply(batch.returns, batch)[:, 0].round(3).tolist()
    [0.547, -0.434, 1.0]
    """

    name: ClassVar[str] = "soft_min"
    sums: ClassVar[bool] = True
    k: float = bounded(1.0, above=0.0)
    """Large: the least of the rewards; small: their mean."""

    def apply(self, values: Array, batch: Batch) -> Array:
        factors = np.broadcast_to(batch.weighed(None), values.shape)
        values = np.where(factors == 0, np.nan, values * np.sign(factors))
        weights = np.where(np.isnan(values), 0.0, np.abs(factors))
        least = np.fmin.reduce(values, axis=1, keepdims=True)
        lower = np.nansum(weights * np.expm1(-self.k * (values - least)), axis=1, keepdims=True)
        soft: Array = least - np.log1p(divide(lower, weights.sum(axis=1, keepdims=True))) / self.k
        return soft
