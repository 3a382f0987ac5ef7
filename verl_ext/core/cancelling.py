"""Rewards that cancel: set their sums to exactly 0, so that no later division turns rounding into advantages.

Two rewards cancel in a group if their weighted sum is the same for each response. The group then has no learning
signal, and its advantages must be 0. In floating point the sums differ by a little, because rewards arrive as float32.
Whitening divides by the standard deviation of the batch. If the rewards cancel in every group, that standard deviation
is as small as the rounding, and the division makes noise as large as ordinary advantages.

Two rewards of three responses in one group, `a` rising and `b` falling by 0.1:

>>> import numpy as np
>>> from verl_ext.core.batch import Batch
>>> from verl_ext.core.steps import Center, ScaleByStd
>>> exact = [[1000.1, 1000.3], [1000.2, 1000.2], [1000.3, 1000.1]]
>>> batch = Batch.of(np.float32(exact), ["g", "g", "g"], keys=("a", "b"))

`center` and `scale_by_std` should make them (-1, 0, 1) and (1, 0, -1), whose sums are 0. The float32 numbers next to
1000 are 2^-14 = 0.000061 apart, so 1000.1 is stored as 1000.09998. After the division by the standard deviation 0.1,
the sums differ from 0 by up to 0.0004, which is far above the tolerance of 1e-6 for a group with zero variance:

>>> scaled = ScaleByStd().apply(Center().apply(batch.returns, batch), batch)
>>> sums = scaled.sum(axis=1, keepdims=True)
>>> sums.round(5).tolist(), bool(batch.groups.varies(sums).any())
([[-0.0002], [0.00041], [-0.0002]], True)

`rounding_range` computes how large a range of sums the rounding alone can produce. Here the scale of each reward is
1 / 0.1 = 10 and each weight is 1. Each reward contributes 4 units x 0.000061 x 10 = 0.00244, so both give 0.0049:

>>> rounding_range(scaled, batch).round(4)
array([0.0049])

The range of the sums is smaller, so `zero_constant_groups` sets the group to exactly 0:

>>> zero_constant_groups(sums, batch.groups, rounding_range(scaled, batch))[0].tolist()
[[0.0], [0.0], [0.0]]
"""

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.groups import TOLERANCE, Array, Groups, divide

UNITS = 4.0
"""Differences of up to so many units in the last place of float32 are attributed to the rounding of rewards.

The rounding to float32 moves a reward by at most half a unit, and the difference of two rewards by one unit. The
standard deviation that scales the rewards is computed from the same rounded rewards, which adds to the error."""


def rounding_range(values: Array, batch: Batch) -> Array:
    """Return `[G]` the largest range of weighted sums that float32 rounding can produce if the rewards cancel exactly.

    `values` `[N, K]` are the rewards after the steps before the sum. For each reward the bound is `UNITS` units in the
    last place at the largest absolute reward of the group, times the scale of those steps, times the absolute weight.
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


def zero_constant_groups(values: Array, groups: Groups, rounding: Array | float = 0.0) -> tuple[Array, bool]:
    """Return the values, and whether every group is centered. If so, groups with zero variance are set to exactly 0.

    A group has zero variance if its range is at most `1e-6 max(1, |mean|)` or at most `rounding`. The groups are
    centered if the absolute value of each group's mean is at most 1e-6 times the larger of 1 and the largest absolute
    value of the batch.
    """
    mean, varies = groups.variation(values, rounding)
    if not means_are_zero(mean, values):
        return values, False
    is_kept = groups.broadcast(varies) | np.isnan(values)
    return np.where(is_kept, values, 0.0), True


def means_are_zero(mean_of_group: Array, values: Array) -> bool:
    """Return whether the means of all groups are 0 up to rounding, relative to the largest absolute value."""
    largest_value = np.fmax.reduce(np.abs(values), axis=None, initial=1.0)
    return not bool((np.abs(mean_of_group) > TOLERANCE * largest_value).any())
