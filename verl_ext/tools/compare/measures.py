"""What is measured of the advantages of one estimator, alone and against grpo."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from verl_ext.core.groups import Array, Groups, Index, divide

_SAME = 1e-9
"""Means that differ by less count as equal."""


@dataclass(frozen=True)
class Share:
    """A share and its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, groups: int) -> Share:
        """Return Wilson's interval for so many groups: the answers to one prompt are not independent.

        >>> Share.of(0.5, 100).low.__round__(3), Share.of(0.0, 100).high.__round__(3)
        (0.404, 0.037)
        """
        z = 1.96**2 / groups
        middle, half = (value + z / 2) / (1 + z), math.sqrt(z * value * (1 - value) + z * z / 4) / (1 + z)
        return cls(value, min(value, middle - half), max(value, middle + half))


@dataclass(frozen=True)
class Bins:
    """Groups sorted by difficulty."""

    title: str
    labels: tuple[str, ...]
    ids: Index
    """`[G]` the bin of each group."""


@dataclass(frozen=True)
class Measures:
    """The figures of one estimator."""

    dead: Share
    """Groups in which every advantage is 0."""
    zero: Share
    """Trajectories with advantage 0."""
    turned: Share
    """Trajectories whose advantage has the other sign than grpo's."""
    size: float
    """Mean |A|."""
    explained: tuple[float, ...]
    """For each reward, its share of the variance of the advantage, and the rest; see `explained`."""
    by_level: Array
    """For each bin the mean |A|, divided by that of all groups; and the half of its 95 % interval."""


def measure(advantages: Array, baseline: Array, groups: Groups, rewards: Array, level: Bins) -> Measures:
    """Return all figures; `rewards` are those of `normalised`."""
    count, size = len(groups), np.abs(advantages)
    shares = explained(advantages, rewards)
    return Measures(
        dead=Share.of(float((groups.sum(size) == 0).mean()), count),
        zero=Share.of(float((advantages == 0).mean()), count),
        turned=Share.of(float((np.sign(advantages) * np.sign(baseline) < 0).mean()), count),
        size=float(size.mean()),
        explained=(*shares.tolist(), 1 - float(shares.sum())),
        by_level=_by_level(groups.mean(size), level),
    )


def _by_level(sizes: Array, level: Bins) -> Array:
    """`[bins, 2]` the mean of each bin and the half of its interval, divided by the mean of all groups."""
    levels = np.full((len(level.labels), 2), np.nan)
    for index in range(len(level.labels)):
        inside = sizes[level.ids == index]
        if len(inside):
            levels[index, 0] = inside.mean()
        if len(inside) > 1:
            levels[index, 1] = 1.96 * inside.std(ddof=1) / math.sqrt(len(inside))
    return levels / sizes.mean() if sizes.any() else levels


def normalised(rewards: Array, groups: Groups) -> Array:
    """`[N, K]` each reward less its mean in the group, divided by its std there; 0 where it does not vary."""
    mean, varies = groups.variation(rewards)
    centred = np.where(groups.broadcast(varies) | np.isnan(rewards), rewards - groups.broadcast(mean), 0.0)
    return np.nan_to_num(divide(centred, groups.broadcast(groups.std(centred))))


def explained(advantages: Array, rewards: Array) -> Array:
    """`[K]` the share of the variance of the advantage that each reward explains.

    The R^2 of a linear regression, over all trajectories, of the advantage on the rewards normalised in their groups,
    split by Shapley value: the gain in R^2 when the reward is added, averaged over all orders of adding them. The
    shares add up to the R^2 of all rewards; no weighted sum of them with fixed weights explains the rest. NaN for an
    advantage that does not vary, and for more than 12 rewards.

    >>> explained(np.array([1.0, -1.0, 1.0, -1.0]), np.array([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0]]))
    array([1., 0.])
    """
    count = rewards.shape[1]
    covariance = np.atleast_2d(np.cov(np.column_stack([rewards, advantages]), rowvar=False))
    within, against, variance = covariance[:-1, :-1], covariance[:-1, -1], covariance[-1, -1]
    if not variance > 0 or count > 12:  # 2^K regressions
        return np.full(count, np.nan)
    fit = np.zeros(2**count)
    for chosen in range(1, 2**count):
        used = [reward for reward in range(count) if chosen >> reward & 1]
        weights = np.linalg.lstsq(within[np.ix_(used, used)], against[used], rcond=1e-10)[0]
        fit[chosen] = weights @ against[used] / variance
    shares = np.zeros(count)
    for reward in range(count):
        for others in (chosen for chosen in range(2**count) if not chosen >> reward & 1):
            size = others.bit_count()
            weight = math.factorial(size) * math.factorial(count - size - 1) / math.factorial(count)
            shares[reward] += weight * (fit[others | 1 << reward] - fit[others])
    return shares


def by_accuracy(means: Array, title: str) -> Bins:
    """Sort groups by their mean accuracy: 0, four quarters between, 1; and NaN into a bin of its own."""
    unscored, labels = np.isnan(means), ("0", "to 0.25", "to 0.5", "to 0.75", "below 1", "1")
    ids = np.where(unscored, len(labels), np.searchsorted([0, 0.25, 0.5, 0.75, 1 - 2 * _SAME], means - _SAME))
    return Bins(title, (*labels, *["unscored"] * bool(unscored.any())), ids)
