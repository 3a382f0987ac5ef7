"""Batches for tests: the worked example of the specification, and random batches for hypothesis."""

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
        """The rewards of each trajectory."""
        return [list(row) for row in zip(*self.columns.values(), strict=True)]

    def batch(self, count: int | None = None, **more: Any) -> Batch:
        """Return the batch of the core, with the first `count` rewards."""
        return Batch.of(
            [row[:count] for row in self.rewards],
            self.uids,
            keys=tuple(self.columns)[:count],
            lengths=self.lengths,
            accuracy=self.accuracy,
            **more,
        )

    def reordered(self, order: Sequence[int]) -> "Rollout":
        """Return the same trajectories in another order."""
        return Rollout(
            uids=[self.uids[row] for row in order],
            columns={key: [column[row] for row in order] for key, column in self.columns.items()},
            lengths=[self.lengths[row] for row in order],
            accuracy=[self.accuracy[row] for row in order],
        )


ODD_UIDS = (None, "", b"\xff", frozenset(), ("a", (2**70,)))
UID_KINDS = (
    ODD_UIDS.__getitem__,
    str,
    int,
    lambda number: (number, "x"),
    lambda number: str(number).encode(),
    lambda number: number + 0.5,
    lambda number: str(number) if number % 2 else number,
)
"""Functions that return the uid of a group from its number."""


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
    """Return up to five uneven groups in any order, which include groups of one and zero-variance groups.

    With `nan=False` every reward is scored. `lengths` is the minimum length of a response, and `smallest` the minimum
    size of a group. With `few` the rewards are 0, 1, -1 or 0.5.

    Hypothesis chooses the sizes of the groups and a seed. numpy chooses the numbers, because that is ten times faster.
    """
    group_sizes = draw(st.lists(st.integers(smallest, 6), min_size=1, max_size=5))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    uid_of_number = UID_KINDS[random.integers(len(UID_KINDS))]
    group_of_row = random.permutation(np.repeat(np.arange(len(group_sizes)), group_sizes))
    size = len(group_of_row)
    unscored_fraction = random.choice([0.0, 0.0, 0.1, 0.5, 1.0]) if nan else 0.0

    columns = {}
    for key in keys:
        rewards = random_rewards(random, size, few=few)
        columns[key] = random_column(random, rewards, group_of_row, unscored_fraction)
    random_lengths = random.integers(lengths, 10, size=size)
    accuracy = random.integers(0, 5, size=size) / 4
    return Rollout(
        uids=[uid_of_number(int(group)) for group in group_of_row],
        columns=columns,
        lengths=random_lengths.tolist(),
        accuracy=random_column(random, accuracy, group_of_row, unscored_fraction),
    )


def random_rewards(random: np.random.Generator, size: int, *, few: bool) -> np.ndarray:
    """Return rewards from 0, 1, -1 and 0.5, and in half of the cases without `few` multiples of 1/64 up to 10.

    Multiples of 1/64 have exact sums, so a group has either zero variance or a variance far above the tolerance.
    """
    from_four_values = random.choice([0.0, 1.0, -1.0, 0.5], size=size)
    if few or random.random() < 0.5:
        return from_four_values
    return random.integers(-640, 641, size=size) / 64


def random_column(
    random: np.random.Generator, values: np.ndarray, group_of_row: np.ndarray, unscored_fraction: float
) -> list[float]:
    """Return the values, in 30% of the cases constant within each group, with NaN for those that are not scored."""
    is_constant_in_groups = random.random() >= 0.7
    if is_constant_in_groups:
        values = values[group_of_row]
    is_unscored = random.random(len(values)) < unscored_fraction
    return np.where(is_unscored, math.nan, values).tolist()
