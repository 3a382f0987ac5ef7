"""Measure the advantages of the variants, compare them with grpo's, and put the measures into tables."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from verl_ext.core.groups import Array, Groups, Index
from verl_ext.core.metrics import reward_contributions
from verl_ext.files import Table
from verl_ext.tools.compare.rollouts import Rollouts
from verl_ext.tools.compare.variants import GRPO, Outcome

OVERVIEW = """\
A: advantage. In brackets: 95% confidence interval (Wilson, with the number of groups as sample size).
zero-variance groups: fraction of the groups in which every advantage is 0.
zero advantages: fraction of the {rows} whose advantage is 0.
sign flips: fraction of the {rows} whose advantage has the opposite sign of grpo's advantage."""
CONTRIBUTION = """\
Contribution: cov(x, S) / var(S) within a group, where S is the estimator's sum of rewards and x the term of one reward.
The value is a mean over the groups, weighted by their sum of A². Below 0% or above 100%, rewards oppose each other.
rest: contribution of everything in S that is none of these rewards.
-: the contribution is not defined, because the estimator forms no sum of rewards or the sum varies in no group."""
ACCURACY = """\
1.00 is the mean |A| over all groups. ±: 95% confidence interval over the groups."""

_Z = 1.96
"""The 97.5% quantile of the normal distribution, for confidence intervals of 95%."""
_SAME = 1e-9
"""Accuracies that differ by less count as equal."""
_BIN_EDGES = (_SAME, 0.25 + _SAME, 0.5 + _SAME, 0.75 + _SAME, 1 - _SAME)
_BIN_LABELS = ("0", "(0, 0.25]", "(0.25, 0.5]", "(0.5, 0.75]", "(0.75, 1)", "1")


class Section(NamedTuple):
    """A table with its title, and with remarks that explain its columns."""

    title: str
    table: Table
    remarks: str


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


def overview(rollouts: Rollouts, outcomes: Sequence[Outcome]) -> Section:
    """Return the fractions of zeros and of sign flips, and the mean |A| of each variant."""
    groups = rollouts.groups
    baseline = outcomes[0]
    table: Table = [("estimator", "zero-variance groups", "zero advantages", "mean |A|", "sign flips")]
    for outcome in outcomes:
        measures = measure(outcome.advantages, baseline.advantages, groups)
        zero_variance = _with_interval(measures.zero_variance, len(groups))
        zero = _with_interval(measures.zero, len(groups))
        sign_flips = "-" if outcome is baseline else _with_interval(measures.sign_flips, len(groups))
        row = (outcome.variant.label, zero_variance, zero, f"{measures.mean_magnitude:.3f}", sign_flips)
        table.append(row)
    title = f"Advantages compared with {GRPO} on the {rollouts.total_key} ({len(groups):,} groups)"
    return Section(title, table, OVERVIEW.format(rows=rollouts.row_name))


def contributions(rollouts: Rollouts, outcomes: Sequence[Outcome], keys: Sequence[str]) -> Section:
    """Return the contribution of each reward to the advantages of each variant."""
    groups = rollouts.groups
    table: Table = [("estimator", *keys, "rest")]
    for outcome in outcomes:
        nothing = np.zeros(len(outcome.advantages))  # the contribution of a reward that the variant does not use
        terms = np.stack([outcome.contributions.get(key, nothing) for key in keys], axis=1)  # [N, K]
        fractions = reward_contributions(groups, np.nan_to_num(terms), outcome.total, outcome.advantages)
        rest = 1 - fractions.sum()
        table.append((outcome.variant.label, *map(_percentage, (*fractions, rest))))
    return Section(f"Contribution of each reward to the advantage ({len(groups):,} groups)", table, CONTRIBUTION)


def magnitudes_by_accuracy(rollouts: Rollouts, outcomes: Sequence[Outcome], bins: Bins) -> Section:
    """Return the mean |A| of each variant in the groups of each bin."""
    table: Table = [("estimator", *bins.labels)]
    for outcome in outcomes:
        group_means = rollouts.groups.mean(np.abs(outcome.advantages))
        cells = [_with_half_width(mean, half_width) for mean, half_width in relative_means(group_means, bins)]
        table.append((outcome.variant.label, *cells))
    groups_per_bin = np.bincount(bins.ids, minlength=len(bins.labels))
    table.append(("(number of groups)", *(f"{groups:,}" for groups in groups_per_bin)))
    return Section(f"Mean |A| by {bins.title}, relative to all groups", table, ACCURACY)


def measure(advantages: Array, baseline: Array, groups: Groups) -> Measures:
    """Measure advantages, and compare their signs with those of the baseline."""
    magnitudes = np.abs(advantages)
    is_flipped = np.sign(advantages) * np.sign(baseline) < 0
    return Measures(
        zero_variance=float((groups.sum(magnitudes) == 0).mean()),
        zero=float((advantages == 0).mean()),
        sign_flips=float(is_flipped.mean()),
        mean_magnitude=float(magnitudes.mean()),
    )


def by_accuracy(accuracies: Array, title: str) -> Bins:
    """Sort groups by their mean accuracy: 0, the four quarters between, 1. Groups with NaN get a separate bin."""
    is_unscored = np.isnan(accuracies)
    bins = np.searchsorted(_BIN_EDGES, accuracies)
    labels: tuple[str, ...] = _BIN_LABELS
    if is_unscored.any():
        labels = (*_BIN_LABELS, "not scored")
    return Bins(title, labels, np.where(is_unscored, len(_BIN_LABELS), bins))


def relative_means(group_means: Array, bins: Bins) -> Array:
    """Return `[bins, 2]` the mean over the groups of a bin, and half the width of its 95% confidence interval.

    Both are relative to the mean over all groups. `group_means` has the mean |A| of each group.
    """
    import pandas as pd

    statistics = pd.Series(group_means).groupby(bins.ids).agg(["mean", "sem"])
    statistics = statistics.reindex(range(len(bins.labels)))  # NaN for a bin without groups
    means: Array = statistics.to_numpy() * [1.0, _Z]
    return means / group_means.mean() if group_means.any() else means


def interval(fraction: float, groups: int) -> tuple[float, float]:
    """Return Wilson's 95% confidence interval of a fraction.

    The sample size is the number of groups, because the responses to one prompt are not independent.

    >>> interval(0.5, 100)[0].__round__(3), interval(0.0, 100)[1].__round__(3)
    (0.404, 0.037)
    """
    z_squared = _Z**2 / groups
    middle = (fraction + z_squared / 2) / (1 + z_squared)
    variance = z_squared * fraction * (1 - fraction) + z_squared**2 / 4
    half_width = math.sqrt(variance) / (1 + z_squared)
    low = min(fraction, middle - half_width)
    high = max(fraction, middle + half_width)
    return low, high


def _with_interval(fraction: float, groups: int) -> str:
    """Return a fraction as a percentage, with its confidence interval unless both bounds are rounded to the same."""
    low, high = (f"{100 * bound:.0f}" for bound in interval(fraction, groups))
    percentage = f"{fraction:.1%}"
    return percentage if low == high else f"{percentage} ({low}-{high}%)"


def _percentage(contribution: float) -> str:
    if math.isnan(contribution):
        return "-"
    rounded = round(contribution, 3) + 0.0  # turns -0.0 into 0.0
    return f"{rounded:.1%}"


def _with_half_width(mean: float, half_width: float) -> str:
    """Return the mean |A| of a bin. A bin of one group has no interval, and a bin without groups has no mean."""
    if math.isnan(mean):
        return "-"
    return f"{mean:.2f}" if math.isnan(half_width) else f"{mean:.2f} ± {half_width:.2f}"
