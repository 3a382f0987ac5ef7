"""The metrics of a run by step, stored as columns of numbers."""

from __future__ import annotations

import bisect
import sys
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import compress
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Steps = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]
LARGEST = 1e150
"""Squares of larger values, as in a standard deviation, do not fit a float."""


@dataclass
class _Rows:
    """All records with the same metrics, one row of values each. Their steps never descend.

    Most records of a run have the same metrics, so rows are the fastest to append to and take the least memory.
    """

    places: array[int] = field(default_factory=lambda: array("q"))
    """The position of each record in the log."""
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))
    """Row by row; NaN where the record has no number."""

    def drop_after(self, step: int, width: int) -> None:
        kept = bisect.bisect_right(self.steps, step)
        del self.places[kept:], self.steps[kept:], self.values[kept * width :]


@dataclass
class Log:
    """What a run logged. If a metric was logged twice at a step, the later value counts.

    A step below the last one means that the run was resumed from a checkpoint. The later steps are dropped,
    because the run takes them again.
    """

    path: Path
    unreadable: int = 0
    """Number of lines that are not records; they were skipped."""
    resumed_after: list[int] = field(default_factory=list)
    """The steps after which the run was resumed."""
    _rows: dict[tuple[str, ...], _Rows] = field(default_factory=dict)
    _count: int = 0
    _last: int | None = None

    def add(self, step: int, data: Mapping[str, Any]) -> None:
        """Add one record. A value that is no finite number, or too large to compute with, counts as not logged."""
        if self._last is not None and step < self._last:
            before: list[int] = []
            for known, old in self._rows.items():
                old.drop_after(step, len(known))
                at = bisect.bisect_left(old.steps, step)
                before += old.steps[max(0, at - 1) : at]
            self.resumed_after.append(max(before, default=0))
        self._last = step
        self._count += 1
        names = tuple(data)
        rows = self._rows.get(names)
        if rows is None:
            rows = self._rows[tuple(map(sys.intern, names))] = _Rows()
        rows.places.append(self._count)
        rows.steps.append(step)
        numbers = [type(value) in (float, int) and abs(value) <= LARGEST for value in data.values()]
        rows.values.extend([value if use else nan for value, use in zip(data.values(), numbers, strict=True)])

    @property
    def steps(self) -> Steps:
        """All logged steps, ascending."""
        return np.unique(_joined([rows.steps for rows in self._rows.values()], np.int64))

    @property
    def metrics(self) -> set[str]:
        """The metrics that have a value at some step."""
        metrics: set[str] = set()
        for names, rows in self._rows.items():
            logged = np.isfinite(np.array(rows.values)).reshape(len(rows.steps), len(names)).any(axis=0)
            metrics.update(compress(names, logged))
        return metrics

    def __contains__(self, metric: str) -> bool:
        return len(self.series(metric)[0]) > 0

    def series(self, metric: str) -> tuple[Steps, Values]:
        """The steps at which a metric has a value, ascending, and the values."""
        parts = [(rows, names.index(metric), len(names)) for names, rows in self._rows.items() if metric in names]
        values = _joined([rows.values[at::width] for rows, at, width in parts], np.float64)
        logged = np.isfinite(values)
        in_order = np.argsort(_joined([rows.places for rows, *_ in parts], np.int64)[logged], kind="stable")
        steps = _joined([rows.steps for rows, *_ in parts], np.int64)[logged][in_order]
        last = np.diff(steps, append=steps[-1:] + 1) != 0
        return steps[last], values[logged][in_order][last]


def _joined(parts: list[array[Any]], kind: type) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, kind), *map(np.array, parts)])
