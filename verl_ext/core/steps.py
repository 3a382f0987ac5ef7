"""Steps on each reward alone, and the weighted sum.

Steps that combine information across rewards are in `cross_reward`, and steps after the sum in `post_sum` and
`history`. Values are `[N, K]`. NaN means "not scored" and passes through every step.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.cancelling import rounding_range, zero_constant_groups
from verl_ext.core.chain import Step
from verl_ext.core.groups import TOLERANCE, Array, divide, label_text
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
class WeightedSum(Step):
    """Sum the weighted rewards, `sum_k w_k x_k`, and add the KL term of the reward if the batch has one.

    Edge cases: a reward that is not scored contributes 0. A row without a scored reward is not scored. If the
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
        return batch.reward_sums(np.where(np.isnan(values), 0.0, values * batch.weights))

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


def single(values: Array, step: str) -> Array:
    """Return `[N]` the single value of each row. `step` is the name of the step that needs it."""
    if values.shape[1] != 1:
        raise ConfigurationError(
            f"The step {step!r} takes one value per row, found {values.shape[1]}. Put weighted_sum before {step}."
        )
    return values[:, 0]
