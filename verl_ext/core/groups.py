"""Groups of segments, for example the trajectories of a prompt, and statistics within each group."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]
D = TypeVar("D", bound=np.generic)

# A group has zero variance if its range is at most 1e-6 * max(1, |mean|). Comparing the std with 0 is not enough. For
# example, torch's std of six float32 values of 0.3 is 3.3e-8, and dividing by it turns rounding into advantages.
TOLERANCE = 1e-6


def label_text(label: Hashable) -> str:
    """Return how a message names a prompt by its label.

    A text with a space, such as the row of a file, is readable and stays as it is. Any other label is shown as a uid.

    >>> label_text("row 7 of train.parquet"), label_text("3f2a")
    ('row 7 of train.parquet', "uid '3f2a'")
    """
    if isinstance(label, str) and " " in label:
        return label
    return f"uid {label!r}"


def divide(numerator: Array, divisor: Array) -> Array:
    """Divide; the result is 0 where the divisor is 0. NaN stays NaN.

    >>> divide(np.array([1.0, 0.0, np.nan]), np.array([2.0, 0.0, 0.0]))
    array([0.5, 0. , nan])
    """
    zero = divisor == 0
    quotient: Array = numerator / np.where(zero, 1.0, divisor)
    return np.where(zero & ~np.isnan(quotient), 0.0, quotient)


@dataclass(frozen=True)
class Groups:
    """A partition of N segments into G groups of any size.

    Every statistic takes `x` of shape `[N]` or `[N, K]`, skips NaN ("not scored"), and returns one value per group.

    >>> groups = Groups.of(["a", "b", "a"])
    >>> groups.mean(np.array([1.0, 5.0, 2.0]))
    array([1.5, 5. ])
    >>> groups.varies(np.array([1.0, 5.0, 2.0]))
    array([ True, False])
    """

    ids: Index
    """`[N]` group of each segment, numbered by first appearance."""
    order: Index
    """`[N]` segments sorted by group."""
    starts: Index
    """`[G]` where each group begins in `order`."""
    sizes: Index
    """`[G]` segments in each group."""
    labels: tuple[Hashable, ...]
    """`G` labels of the groups."""

    @classmethod
    def of(cls, labels: Iterable[Hashable]) -> Groups:
        """Group by label. Labels may be of any hashable types."""
        group_of_label: dict[Hashable, int] = {}
        group_of_segment = [group_of_label.setdefault(label, len(group_of_label)) for label in labels]
        ids = np.array(group_of_segment, dtype=np.intp)
        order = ids.argsort(kind="stable")
        sizes = np.bincount(ids)
        starts = sizes.cumsum() - sizes
        return cls(ids, order, starts, sizes, tuple(group_of_label))

    def __len__(self) -> int:
        return len(self.starts)

    def sum(self, x: Array) -> Array:
        """Return the sum of the scored values."""
        values = np.where(np.isnan(x), 0.0, x)
        return np.add.reduceat(values[self.order], self.starts)

    def count(self, x: Array) -> Array:
        """Return the number of scored values."""
        is_scored = (~np.isnan(x)).astype(np.float64)
        return np.add.reduceat(is_scored[self.order], self.starts)

    def mean(self, x: Array) -> Array:
        """Return the mean of the scored values, NaN for a group without scored values."""
        count = self.count(x)
        mean: Array = np.divide(self.sum(x), count, out=np.full(count.shape, np.nan), where=count > 0)
        return mean

    def std(self, centered: Array) -> Array:
        """Return the standard deviation (n - 1) of centered values, 0 for fewer than two scored values."""
        squares = self.sum(np.square(centered))
        degrees_of_freedom = self.count(centered) - 1
        return np.sqrt(divide(squares, degrees_of_freedom))

    def varies(self, x: Array) -> Bools:
        """Return whether a group has nonzero variance: `max - min > 1e-6 * max(1, |mean|)`.

        A group with a single scored value has zero variance.
        """
        return self.variation(x)[1]

    def variation(self, x: Array, rounding: Array | float = 0.0) -> tuple[Array, Bools]:
        """Return the mean of the scored values, and whether they vary (see `varies`) by more than `rounding`."""
        mean = self.mean(x)
        by_group = x[self.order]
        value_range = np.fmax.reduceat(by_group, self.starts) - np.fmin.reduceat(by_group, self.starts)
        tolerance = TOLERANCE * np.fmax(1.0, np.abs(mean))
        varies: Bools = value_range > np.fmax(tolerance, rounding)
        return mean, varies

    def broadcast(self, per_group: npt.NDArray[D]) -> npt.NDArray[D]:
        """Broadcast one value per group to its segments: `[G, ...] -> [N, ...]`."""
        return per_group[self.ids]
