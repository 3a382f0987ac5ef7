"""What is measured of the advantages of one estimator, alone and against grpo."""

import math
from dataclasses import dataclass

import numpy as np

from verl_ext.core.groups import Array, Groups, Index

_SAME = 1e-9
"""Means that differ by less count as equal."""


def interval(value: float, groups: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of so many groups: the answers to one prompt are not independent.

    >>> interval(0.5, 100)[0].__round__(3), interval(0.0, 100)[1].__round__(3)
    (0.404, 0.037)
    """
    z = 1.96**2 / groups
    middle, half = (value + z / 2) / (1 + z), math.sqrt(z * value * (1 - value) + z * z / 4) / (1 + z)
    return min(value, middle - half), max(value, middle + half)


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

    dead: float
    """The share of groups in which every advantage is 0."""
    zero: float
    """The share of trajectories with advantage 0."""
    turned: float
    """The share of trajectories whose advantage has the other sign than grpo's."""
    size: float
    """Mean |A|."""
    by_level: Array
    """For each bin the mean |A|, divided by that of all groups; and the half of its 95 % interval."""


def measure(advantages: Array, baseline: Array, groups: Groups, level: Bins) -> Measures:
    """Return all figures."""
    size = np.abs(advantages)
    return Measures(
        dead=float((groups.sum(size) == 0).mean()),
        zero=float((advantages == 0).mean()),
        turned=float((np.sign(advantages) * np.sign(baseline) < 0).mean()),
        size=float(size.mean()),
        by_level=_by_level(groups.mean(size), level),
    )


def _by_level(sizes: Array, level: Bins) -> Array:
    """`[bins, 2]` the mean of each bin and the half of its interval, divided by the mean of all groups."""
    import pandas as pd

    found = pd.Series(sizes).groupby(level.ids).agg(["mean", "sem"]).reindex(range(len(level.labels)))
    levels: Array = found.to_numpy() * [1.0, 1.96]
    return levels / sizes.mean() if sizes.any() else levels


def by_accuracy(means: Array, title: str) -> Bins:
    """Sort groups by their mean accuracy: 0, four quarters between, 1; and NaN into a bin of its own."""
    unscored, labels = np.isnan(means), ("0", "to 0.25", "to 0.5", "to 0.75", "below 1", "1")
    ids = np.where(unscored, len(labels), np.searchsorted([0, 0.25, 0.5, 0.75, 1 - 2 * _SAME], means - _SAME))
    return Bins(title, (*labels, *["unscored"] * bool(unscored.any())), ids)
