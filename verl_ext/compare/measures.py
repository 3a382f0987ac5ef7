"""What is measured of the advantages of one estimator, alone and against grpo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl_ext.core.groups import Array, Groups, Index, divide

ACCURACY_EDGES = (0.25, 0.5, 0.75)
LENGTH_BINS = 5
MOST_REWARDS = 12
"""More would take too long: Shapley values of 12 rewards take 2^12 = 4,096 regressions."""
_SAME = 1e-9


@dataclass(frozen=True)
class Bins:
    """Trajectories sorted into bins."""

    title: str
    labels: tuple[str, ...]
    ids: Index

    @property
    def counts(self) -> Array:
        """Trajectories in each bin."""
        return np.bincount(self.ids, minlength=len(self.labels)).astype(np.float64)

    def mean(self, values: Array) -> Array:
        """The mean over each bin; NaN for an empty one."""
        total = np.bincount(self.ids, weights=values, minlength=len(self.labels))
        counts = self.counts
        means: Array = np.where(counts > 0, divide(total.astype(np.float64), counts), np.nan)
        return means


@dataclass(frozen=True)
class Measures:
    """The figures of one estimator."""

    dead: float
    """Share of groups in which every advantage is 0."""
    zero: float
    """Share of trajectories with advantage 0."""
    size: float
    """Mean |A|."""
    turned: float
    """Share of trajectories whose advantage has the other sign than grpo's."""
    rank: float
    """Spearman's correlation with grpo's advantage, over all trajectories."""
    explained: tuple[float, ...]
    """For each reward, its share of the variance of the advantage; see `explained`."""
    by_accuracy: Array
    by_length: Array | None
    distance: Array
    """`[G]` how far a group's advantages are from grpo's; see `distances`."""


def measure(
    advantages: Array, baseline: Array, groups: Groups, rewards: Array, level: Bins, length: Bins | None
) -> Measures:
    """All figures; `rewards` are those of `normalised`."""
    size = np.abs(advantages)
    alive = groups.sum(size) > 0
    return Measures(
        dead=1.0 - float(alive.mean()),
        zero=1.0 - float(np.count_nonzero(advantages)) / len(advantages),
        size=float(size.mean()),
        turned=float((np.sign(advantages) * np.sign(baseline) < 0).mean()),
        rank=spearman(advantages, baseline),
        explained=tuple(explained(advantages, rewards).tolist()),
        by_accuracy=level.mean(size),
        by_length=None if length is None else length.mean(size),
        distance=distances(advantages, baseline, groups),
    )


def normalised(rewards: Array, groups: Groups) -> Array:
    """`[N, K]` each reward less its mean in the group, divided by its std there; 0 where it does not vary."""
    mean, varies = groups.variation(rewards)
    centred = np.where(groups.broadcast(varies) | np.isnan(rewards), rewards - groups.broadcast(mean), 0.0)
    return np.nan_to_num(divide(centred, groups.broadcast(groups.std(centred))))


def explained(advantages: Array, rewards: Array) -> Array:
    """`[K]` the share of the variance of the advantage that each reward explains.

    The R^2 of a linear regression, over all trajectories, of the advantage on the rewards normalised in their groups,
    split by Shapley value: the gain in R^2 when the reward is added, averaged over all orders of adding them. The
    shares add up to the R^2 of all rewards; no weighted sum of them with fixed weights explains the rest.

    >>> explained(np.array([1.0, -1.0, 1.0, -1.0]), np.array([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0]]))
    array([1., 0.])
    """
    count = rewards.shape[1]
    every = np.column_stack([rewards, advantages])
    covariance = np.atleast_2d(np.cov(every, rowvar=False))
    within, against, variance = covariance[:-1, :-1], covariance[:-1, -1], covariance[-1, -1]
    if not variance > 0:
        return np.full(count, np.nan)
    fit = np.zeros(2**count)
    for chosen in range(1, 2**count):
        of = [at for at in range(count) if chosen >> at & 1]
        weights = np.linalg.lstsq(within[np.ix_(of, of)], against[of], rcond=1e-10)[0]
        fit[chosen] = weights @ against[of] / variance
    shares = np.zeros(count)
    for at in range(count):
        for others in (chosen for chosen in range(2**count) if not chosen >> at & 1):
            size = others.bit_count()
            weight = math.factorial(size) * math.factorial(count - size - 1) / math.factorial(count)
            shares[at] += weight * (fit[others | 1 << at] - fit[others])
    return shares


def spearman(x: Array, y: Array) -> float:
    """The correlation of ranks, equal values at their mean rank; NaN where one of them is constant.

    >>> round(spearman(np.array([1.0, 2.0, 3.0, 3.0]), np.array([5.0, 7.0, 9.0, 8.0])), 4)
    0.9487
    """
    ranks = _ranks(x), _ranks(y)
    return float(np.corrcoef(*ranks)[0, 1]) if all(np.ptp(rank) for rank in ranks) else math.nan


def _ranks(values: Array) -> Array:
    # In float32, values that differ by rounding are equal.
    _, ids, counts = np.unique(values.astype(np.float32), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: Array = ends - (counts - 1) / 2
    return means[ids]


def distances(advantages: Array, baseline: Array, groups: Groups) -> Array:
    """`[G]` the root mean square, over a group, of the difference from grpo's advantages.

    Both are divided by their root mean square over all trajectories, so that an estimator that only has larger
    advantages is at distance 0.
    """
    apart = _scaled(advantages) - _scaled(baseline)
    return np.sqrt(groups.mean(np.square(apart)))


def _scaled(values: Array) -> Array:
    size = float(np.sqrt(np.mean(np.square(values))))
    return values / size if size else values


def by_level(values: Array, groups: Groups, title: str, *, unit: bool) -> Bins:
    """Trajectories by their group's mean accuracy; if it is no accuracy (`unit` is False), by quarters of its range."""
    means = groups.mean(values)
    low, high = (0.0, 1.0) if unit else (float(np.nanmin(means)), float(np.nanmax(means)))
    width = high - low
    if not width > 0:
        return Bins(title, (f"{low:g}",), np.zeros(len(values), dtype=np.intp))
    edges = [low, *(low + width * edge for edge in ACCURACY_EDGES), high]
    inner = np.searchsorted(edges[1:-1], means - _SAME * width) + 1
    ids = np.where(means <= low + _SAME * width, 0, np.where(means >= high - _SAME * width, 5, inner))
    shown = [f"{edge:.3g}" for edge in edges]
    labels = [shown[0], *(f"to {edge}" for edge in shown[1:-1]), f"below {shown[-1]}", shown[-1]]
    if np.isnan(means).any():
        labels.append("unscored")
        ids = np.where(np.isnan(means), 6, ids)
    return Bins(title, tuple(labels), groups.broadcast(ids))


def by_length(lengths: Array, unit: str) -> Bins:
    """Trajectories by length, as many in each bin as equal lengths allow."""
    if lengths.min() == lengths.max():
        return Bins(f"length in {unit}", (f"{lengths[0]:,.0f}",), np.zeros(len(lengths), dtype=np.intp))
    edges = np.quantile(lengths, np.linspace(0, 1, LENGTH_BINS + 1)[1:-1], method="higher")
    # Many responses end at the limit: they are a bin of their own.
    edges = np.unique(np.minimum(edges, lengths[lengths < lengths.max()].max()))
    bounds = [lengths.min(), *edges, lengths.max()]
    ids = np.searchsorted(edges, lengths)
    labels = [f"{bounds[0]:,.0f} to {bounds[1]:,.0f}", *(f"to {bound:,.0f}" for bound in bounds[2:])]
    return Bins(f"length in {unit}", tuple(labels), ids.astype(np.intp))


def furthest(distance: Sequence[Array], top: int) -> list[tuple[int, int]]:
    """For each estimator the groups that are furthest from grpo, as (estimator, group); none twice, none at 0."""
    chosen: dict[int, int] = {}
    for at, values in enumerate(distance):
        order = np.argsort(-values, kind="stable")
        far = [group for group in order[: top + len(chosen)].tolist() if values[group] > _SAME]
        chosen |= dict.fromkeys([group for group in far if group not in chosen][:top], at)
    return [(at, group) for group, at in chosen.items()]
