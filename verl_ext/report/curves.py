"""From logs to curves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_ext.errors import DataError, unknown
from verl_ext.report.log import Log

Array = npt.NDArray[np.float64]
Experiments = Mapping[str, Sequence[Log]]
"""The logs of the runs of each name: seeds of one experiment."""


@dataclass(frozen=True)
class Curve:
    """One metric of the runs of one name: the steps that all of them logged, and one row of values per run."""

    steps: npt.NDArray[Any]
    values: Array

    @property
    def mean(self) -> Array:
        """Mean over the runs."""
        return np.asarray(self.values.mean(axis=0))

    @property
    def std(self) -> Array:
        """Standard deviation over the runs (ddof 1); 0 for a single run."""
        return standard_deviation(self.values)

    def after(self, count: int) -> Curve:
        """Drop the first `count` steps, unless there are no others."""
        return self if count >= len(self.steps) else Curve(self.steps[count:], self.values[:, count:])

    def smooth(self, width: int) -> Curve:
        """Replace each value by the mean of the last `width` steps, fewer at the start.

        >>> Curve(np.arange(4), np.array([[0.0, 2.0, 4.0, 6.0]])).smooth(2).values
        array([[0., 1., 3., 5.]])
        """
        totals = np.cumsum(np.pad(self.values, ((0, 0), (1, 0))), axis=1)
        ends = np.arange(1, len(self.steps) + 1)
        begins = np.maximum(0, ends - width)
        return Curve(self.steps, (totals[:, ends] - totals[:, begins]) / (ends - begins))

    @property
    def area(self) -> Array:
        """The mean height of each run: the area under its curve divided by the number of steps.

        >>> Curve(np.array([1, 2, 5]), np.array([[0.0, 2.0, 2.0]])).area
        array([1.75])
        """
        widths = np.diff(self.steps)
        if not len(widths):
            return self.values[:, 0]
        heights = (self.values[:, 1:] + self.values[:, :-1]) / 2
        return np.asarray((heights * widths).sum(axis=1) / widths.sum())


def standard_deviation(values: Array) -> Array:
    """Standard deviation over the first axis (ddof 1); 0 if it has one entry."""
    return values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros_like(values[0])


def curve(logs: Sequence[Log], metric: str) -> Curve:
    """A metric of several runs, at the steps at which all of them logged it."""
    series = [log.series(metric) for log in logs]
    steps = reduce(np.intersect1d, (logged for logged, _ in series))
    if not len(steps):
        paths = ", ".join(str(log.path) for log in logs)
        raise DataError(f"no step has {metric!r} in all of {paths}")
    return Curve(steps, np.array([values[np.searchsorted(logged, steps)] for logged, values in series]))


def rewards(experiments: Experiments) -> list[str]:
    """The metrics to show: the mean of each named reward, or verl's own score if there is none."""
    metrics = logged(experiments)
    named = sorted(name for name in metrics if name.startswith("reward/") and name.endswith("/mean"))
    return named or [name for name in ("critic/score/mean",) if name in metrics]


def check_metrics(metrics: Iterable[str], experiments: Experiments) -> None:
    """Raise for a metric that no run has logged."""
    valid = logged(experiments)
    for metric in metrics:
        if metric not in valid:
            raise DataError(unknown("metric", metric, valid))


def logged(experiments: Experiments) -> set[str]:
    """The names of all metrics that any run has logged."""
    return set().union(*(log.metrics for logs in experiments.values() for log in logs))


def title(metric: str) -> str:
    """A short title for a metric.

    >>> title("reward/format/mean"), title("critic/score/mean"), title("actor/entropy")
    ('format', 'score', 'actor/entropy')
    """
    parts = metric.split("/")
    return parts[1] if len(parts) == 3 and parts[0] in ("reward", "critic") and parts[2] == "mean" else metric
