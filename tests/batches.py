"""Batches for tests: the worked example of the specification, hypothesis strategies."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from verl_ext.core.batch import Batch

# The worked example of the specification: groups A, B, C of four responses.
UIDS = list("AAAABBBBCCCC")
ACC = [1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
FMT = [1.0, 1, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0]
LENGTHS = [4, 2, 3, 1, 2, 2, 5, 3, 3, 3, 3, 1]


@dataclass(frozen=True)
class Rollout:
    """Random trajectories, as plain lists."""

    uids: list[Hashable]
    columns: dict[str, list[float]]
    lengths: list[int]
    accuracy: list[float]

    @property
    def rewards(self) -> list[list[float]]:
        return [list(row) for row in zip(*self.columns.values(), strict=True)]

    def batch(self, count: int | None = None, **more: Any) -> Batch:
        """As the core sees it, with so many of the rewards."""
        return Batch.of(
            [row[:count] for row in self.rewards],
            self.uids,
            keys=tuple(self.columns)[:count],
            lengths=self.lengths,
            accuracy=self.accuracy,
            **more,
        )

    def reordered(self, order: Sequence[int]) -> "Rollout":
        return Rollout(
            [self.uids[i] for i in order],
            {key: [column[i] for i in order] for key, column in self.columns.items()},
            [self.lengths[i] for i in order],
            [self.accuracy[i] for i in order],
        )


ODD_UIDS = (None, "", b"\xff", frozenset(), ("a", (2**70,)))
UID_KINDS = (
    ODD_UIDS.__getitem__,
    str,
    int,
    lambda n: (n, "x"),
    lambda n: str(n).encode(),
    lambda n: n + 0.5,
    lambda n: str(n) if n % 2 else n,
)


@st.composite
def rollouts(
    draw: st.DrawFn,
    *,
    keys: Sequence[str] = ("a", "b"),
    nan: bool = True,
    lengths: int = 0,
    smallest: int = 1,
    few: bool = False,
) -> Rollout:
    """Up to five uneven groups in any order, singletons and constant groups among them.

    Without `nan` all is scored; `lengths` and `smallest` are the least length and size of a group; `few` draws rewards
    from 0, 1, -1 and 0.5 only.

    Hypothesis chooses the groups' sizes and a seed; numpy the numbers, because that is ten times faster.
    """
    sizes = draw(st.lists(st.integers(smallest, 6), min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    label = UID_KINDS[rng.integers(len(UID_KINDS))]
    ids = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    missing = rng.choice([0.0, 0.0, 0.1, 0.5, 1.0]) if nan else 0.0

    def column(values: np.ndarray) -> list[float]:
        chosen = values if rng.random() < 0.7 else values[ids]  # the latter constant within groups
        return np.where(rng.random(len(ids)) < missing, math.nan, chosen).tolist()

    def number() -> np.ndarray:
        # Multiples of 1/64: a group has no variance at all or plenty of it, and sums are exact.
        usual = rng.choice([0.0, 1.0, -1.0, 0.5], size=len(ids))
        return usual if few or rng.random() < 0.5 else rng.integers(-640, 641, size=len(ids)) / 64

    return Rollout(
        uids=[label(int(group)) for group in ids],
        columns={key: column(number()) for key in keys},
        lengths=rng.integers(lengths, 10, size=len(ids)).tolist(),
        accuracy=column(rng.integers(0, 5, size=len(ids)) / 4),
    )
