"""Measure the advantages of one estimator, alone and compared with grpo's."""

import math
from dataclasses import dataclass

import numpy as np

from verl_ext.core.groups import Array, Groups, Index

_SAME = 1e-9
"""Means that differ by less count as equal."""


def interval(value: float, groups: int) -> tuple[float, float]:
    """Return Wilson's 95% confidence interval of a fraction.

    The sample size is the number of groups, because the responses to one prompt are not independent.

    >>> interval(0.5, 100)[0].__round__(3), interval(0.0, 100)[1].__round__(3)
    (0.404, 0.037)
    """
    z = 1.96**2 / groups
    middle, half = (value + z / 2) / (1 + z), math.sqrt(z * value * (1 - value) + z * z / 4) / (1 + z)
    return min(value, middle - half), max(value, middle + half)


@dataclass(frozen=True)
class Bins:
    """Groups sorted by the accuracy of their prompt."""

    title: str
    labels: tuple[str, ...]
    ids: Index
    """`[G]` the bin of each group."""


@dataclass(frozen=True)
class Measures:
    """The numbers that describe the advantages of one estimator."""

    zero_variance: float
    """Fraction of the groups in which every advantage is 0."""
    zero: float
    """Fraction of the rows whose advantage is 0."""
    sign_flips: float
    """Fraction of the rows whose advantage and grpo's advantage have opposite signs."""
    mean_magnitude: float
    """Mean |A|."""
    by_level: Array
    """`[bins, 2]` mean |A| of each bin divided by that of all groups, and half the width of its 95% interval."""


def measure(advantages: Array, baseline: Array, groups: Groups, level: Bins) -> Measures:
    """Measure advantages, and compare their signs with those of the baseline."""
    magnitudes = np.abs(advantages)
    return Measures(
        zero_variance=float((groups.sum(magnitudes) == 0).mean()),
        zero=float((advantages == 0).mean()),
        sign_flips=float((np.sign(advantages) * np.sign(baseline) < 0).mean()),
        mean_magnitude=float(magnitudes.mean()),
        by_level=_by_level(groups.mean(magnitudes), level),
    )


def _by_level(means: Array, level: Bins) -> Array:
    """Return `Measures.by_level`; `means` are the mean |A| of each group."""
    import pandas as pd

    found = pd.Series(means).groupby(level.ids).agg(["mean", "sem"]).reindex(range(len(level.labels)))
    levels: Array = found.to_numpy() * [1.0, 1.96]
    return levels / means.mean() if means.any() else levels


def by_accuracy(means: Array, title: str) -> Bins:
    """Sort groups by their mean accuracy: 0, the four quarters between, 1. Groups with NaN get a separate bin."""
    unscored, labels = np.isnan(means), ("0", "(0, 0.25]", "(0.25, 0.5]", "(0.5, 0.75]", "(0.75, 1)", "1")
    ids = np.where(unscored, len(labels), np.searchsorted([0, 0.25, 0.5, 0.75, 1 - 2 * _SAME], means - _SAME))
    return Bins(title, (*labels, *["not scored"] * bool(unscored.any())), ids)
