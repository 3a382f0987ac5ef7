"""Prompt groups: which trajectories answer the same prompt, and statistics within each group."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from verl_ext.errors import DataError

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]
D = TypeVar("D", bound=np.generic)

# A group has no variance if its range is at most 1e-6 * max(1, |mean|). Comparing the std with 0 is not
# enough: torch's std of six float32 values of 0.3 is 3.3e-8, and dividing by it turns rounding into advantages.
TOLERANCE = 1e-6


def divide(numerator: Array, divisor: Array) -> Array:
    """Divide; the result is 0 where the divisor is 0.

    >>> divide(np.array([1.0, 0.0]), np.array([2.0, 0.0]))
    array([0.5, 0. ])
    """
    zero = divisor == 0
    quotient: Array = numerator / np.where(zero, 1.0, divisor)
    return np.where(zero, 0.0, quotient)


@dataclass(frozen=True)
class Groups:
    """A partition of N trajectories into G groups of any size.

    Every statistic takes `x` of shape `[N]` or `[N, K]`, skips NaN ("not scored"), and returns one value per group.

    >>> groups = Groups.of(["a", "b", "a"])
    >>> groups.mean(np.array([1.0, 5.0, 2.0]))
    array([1.5, 5. ])
    >>> groups.varies(np.array([1.0, 5.0, 2.0]))
    array([ True, False])
    """

    ids: Index
    """`[N]` group of each trajectory, numbered by first appearance."""
    order: Index
    """`[N]` trajectories sorted by group."""
    starts: Index
    """`[G]` where each group begins in `order`."""
    sizes: Index
    """`[G]` trajectories in each group."""
    labels: tuple[Hashable, ...]
    """`G` labels of the groups."""

    @classmethod
    def of(cls, labels: Iterable[Hashable]) -> Groups:
        """Group by label. Labels may be of any hashable types."""
        labels = list(labels)
        codes: defaultdict[Hashable, int] = defaultdict()
        codes.default_factory = codes.__len__  # a new label gets the next number
        try:
            ids = np.fromiter(map(codes.__getitem__, labels), dtype=np.intp, count=len(labels))
        except TypeError as error:
            bad = next(label for label in labels if _unhashable(label))
            raise DataError(f"group labels must be hashable, found {bad!r} ({type(bad).__name__})") from error
        # numpy sorts 16-bit integers by radix, in linear time.
        keys = ids.astype(np.uint16) if len(codes) <= 65536 else ids
        sizes = np.bincount(ids)
        return cls(ids, keys.argsort(kind="stable"), sizes.cumsum() - sizes, sizes, tuple(codes))

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def firsts(self) -> Index:
        """`[G]` the first trajectory of each group."""
        return self.order[self.starts]

    def sum(self, x: Array) -> Array:
        """Sum of the scored values."""
        return self.sum_and_count(x)[0]

    def mean(self, x: Array) -> Array:
        """Mean of the scored values; NaN for a group without any."""
        return self._mean_of_sorted(x.take(self.order, axis=0))

    def std(self, centred: Array) -> Array:
        """Standard deviation, with n - 1, of values centred in their group; 0 for fewer than two scored values."""
        squares, count = self.sum_and_count(np.square(centred))
        return np.sqrt(divide(squares, count - 1))

    def varies(self, x: Array) -> Bools:
        """Whether a group has variance: `max - min > 1e-6 * max(1, |mean|)`; never for a single scored value."""
        return self.variation(x)[1]

    def variation(self, x: Array) -> tuple[Array, Bools]:
        """Mean of the scored values, and whether they vary (see `varies`)."""
        sorted_x = x.take(self.order, axis=0)
        mean = self._mean_of_sorted(sorted_x)
        width = np.fmax.reduceat(sorted_x, self.starts) - np.fmin.reduceat(sorted_x, self.starts)
        return mean, np.asarray(width > TOLERANCE * np.fmax(1.0, np.abs(mean)))

    def sum_and_count(self, x: Array) -> tuple[Array, Array]:
        """Sum and number of the scored values. The counts may have one column if they are the same for all columns."""
        sorted_x = x.take(self.order, axis=0)
        total = np.add.reduceat(sorted_x, self.starts)
        if _has_nan(total):
            return self._scored_sum_and_count(sorted_x)
        return total, self._counts if x.ndim == 1 else self._counts[:, None]

    def _mean_of_sorted(self, x: Array) -> Array:
        """`mean` of values that are sorted by group."""
        total: Array = np.add.reduceat(x, self.starts)
        if _has_nan(total):
            total, count = self._scored_sum_and_count(x)
            mean: Array = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
        else:
            mean = total / (self._counts if x.ndim == 1 else self._counts[:, None])
        return mean

    def _scored_sum_and_count(self, x: Array) -> tuple[Array, Array]:
        """`sum_and_count` of values that are sorted by group, of which some are NaN."""
        missing = np.isnan(x)
        total = np.add.reduceat(np.where(missing, 0.0, x), self.starts)
        return total, np.add.reduceat((~missing).astype(np.float64), self.starts)

    @cached_property
    def _counts(self) -> Array:
        return self.sizes.astype(np.float64)

    def broadcast(self, per_group: npt.NDArray[D]) -> npt.NDArray[D]:
        """Broadcast one value per group to its trajectories: `[G, ...] -> [N, ...]`."""
        return per_group.take(self.ids, axis=0)


def _has_nan(totals: Array) -> bool:
    """Whether a value is NaN; also true if infinite values cancel."""
    return math.isnan(np.add.reduce(totals, axis=None))


def _unhashable(label: Hashable) -> bool:
    try:
        hash(label)
    except TypeError:
        return True
    return False
