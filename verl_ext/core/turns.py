"""Per-turn rewards: each turn is a segment of a batch, and its values are returns.

A reward function returns per-turn rewards as a list with one number per turn, encoded as text by `per_turn`.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from verl_ext.core.groups import Array, Bools, Index, label_text
from verl_ext.errors import DataError


@dataclass(frozen=True)
class Turns:
    """The turn number of each segment. The turns of a trajectory are consecutive segments, numbered from 0.

    The return of a per-turn reward is `G_itk = sum_{s >= t} discount^(s - t) r_isk`. A reward of the trajectory is
    received at its last turn `n_i`, so its return is `discount^(n_i - t) R_ik`. A return is not scored if one of its
    rewards is not scored.

    >>> turns = Turns(np.array([0, 1, 0]), columns=(0,), discount=0.5)
    >>> turns.returns(np.array([[1.0, 8.0], [2.0, 8.0], [5.0, 3.0]]))
    array([[2., 4.],
           [2., 8.],
           [5., 3.]])
    """

    number: Index
    """`[N]` the turn number of each segment."""
    columns: tuple[int, ...] = ()
    """The columns of per-turn rewards. The other columns repeat the reward of the trajectory."""
    discount: float = 1.0
    """The discount factor per turn, `algorithm.rewards.turn_discount`."""

    def __post_init__(self) -> None:
        number_above = np.append(-1, self.number[:-1])
        begins = self.number == 0
        continues = self.number == number_above + 1
        if not (begins | continues).all():
            raise DataError(
                "The turn numbers of a response must be 0, 1, 2, ... in consecutive rows. Use Turns.of_counts([...]) "
                "with the number of turns of each response."
            )

    @classmethod
    def of_counts(cls, counts: Sequence[int] | Index, columns: tuple[int, ...] = (), discount: float = 1.0) -> Turns:
        """Number the turns of trajectories, given the number of turns of each trajectory.

        >>> Turns.of_counts([2, 1]).number
        array([0, 1, 0])
        """
        counts = np.asarray(counts, dtype=np.intp)
        if (counts < 1).any():
            raise DataError("Each response must have at least one turn. Use the count 1 for a response without tokens.")
        first_segment_of_trajectory = counts.cumsum() - counts
        first_segment = first_segment_of_trajectory.repeat(counts)
        number = np.arange(len(first_segment)) - first_segment
        return cls(number, columns, discount)

    @cached_property
    def one_per_trajectory(self) -> bool:
        """Whether each trajectory has one turn, so that every segment is a whole trajectory."""
        return not self.number.any()

    @cached_property
    def trajectory(self) -> Index:
        """`[N]` the trajectory of each segment."""
        begins = self.number == 0
        return np.cumsum(begins) - 1

    @cached_property
    def last(self) -> Bools:
        """`[N]` whether the segment is the last turn of its trajectory. It is True once per trajectory."""
        begins = self.number == 0
        # A turn is the last if the next segment begins a trajectory. The first segment follows the last one here.
        return np.roll(begins, -1)

    def returns(self, rewards: Array) -> Array:
        """Return `[N, K]` the returns of the rewards `[N, K]`."""
        # A reward of the trajectory is discounted by the number of turns until its last turn.
        last_number = self.number[self.last][self.trajectory]
        later_turns = last_number - self.number
        discounts = np.power(self.discount, later_turns, dtype=np.float64)
        returns: Array = rewards * discounts[:, None]
        # A per-turn reward is added to the discounted rewards of later turns.
        returns[:, self.columns] = self.discounted_sums(rewards[:, self.columns])
        return returns

    def discounted_sums(self, values: Array) -> Array:
        """Return for each turn the sum of its value and the discounted values of the trajectory's later turns.

        `values` and the result have one entry per turn: `[N]` or `[N, K]`. A value that only the last turn has is thus
        discounted to the earlier turns.

        >>> Turns(np.array([0, 1, 2, 0]), discount=0.5).discounted_sums(np.array([0.0, 0.0, 8.0, 1.0]))
        array([2., 4., 8., 1.])
        """
        sums: Array = values.copy()
        last_number = self.number.max(initial=0)
        for number in reversed(range(last_number)):
            # The sums of the turns `number + 1` are complete. These turns are the next segments.
            segments = np.flatnonzero((self.number == number) & ~self.last)
            sums[segments] += self.discount * sums[segments + 1]
        return sums

    def trajectory_weights(self, counted: Bools) -> Array:
        """Return weights that sum to 1 per trajectory: 1/n for each of its n segments in `counted`, 0 elsewhere.

        `counted` and the result are `[N]`, or `[N, K]` with separate weights in each column.
        """
        is_counted = counted.astype(np.float64)
        if self.one_per_trajectory:
            return is_counted
        first_segment_of_trajectory = np.flatnonzero(self.number == 0)
        counted_segments = np.add.reduceat(is_counted, first_segment_of_trajectory)[self.trajectory]
        return np.divide(1.0, counted_segments, out=np.zeros(counted.shape), where=counted)


def per_turn(entries: Iterable[float]) -> str:
    """Encode the rewards of a response's turns as text for the result of a reward function.

    verl can pass text from a reward function to the trainer, but no lists of different lengths.

    >>> per_turn([1, 0.5])
    '[1.0, 0.5]'
    """
    if isinstance(entries, str | bytes | Mapping):
        raise DataError(
            f"per_turn takes a list with one number per turn, found {reprlib.repr(entries)}. Return "
            "verl_ext.per_turn([0.0, 1.0]), for example."
        )
    numbers = [float(entry) for entry in entries]
    return json.dumps(numbers)


def pad_entries(
    key: str, labels: Sequence[Hashable], lists: Sequence[Any], turns: Index, truncated: Bools, *, text: bool
) -> tuple[Array, Index]:
    """Pad each response's list with 0 to its number of turns, and concatenate. Also return the lengths before padding.

    With `text` a list must be what `per_turn` returns. `turns` is the number of turns of each response, and
    `truncated` says whether a response was truncated at its length limit. The list of a truncated response may be
    longer than its number of turns, and is truncated as well. Any other list that is too long is an error.

    >>> pad_entries("tool", ["p", "q"], ["[1.0]", "[2, 3]"], np.array([2, 1]), np.array([False, True]), text=True)
    (array([1., 0., 2.]), array([1, 2]))
    """
    padded: list[float] = []
    lengths: list[int] = []
    for label, value, turn_count, is_truncated in zip(labels, lists, turns.tolist(), truncated.tolist(), strict=True):
        entries = _decode(value, text=text)
        if entries is None:
            raise DataError(
                f"The reward {key!r} of {label_text(label)} is {reprlib.repr(value)}, but algorithm.rewards.per_turn "
                f"names {key!r}, so it must have one number per turn. {_remedy(key, value)}",
                label=label,
            )
        if len(entries) > turn_count and not is_truncated:
            raise DataError(
                f"The reward {key!r} of {label_text(label)} has {len(entries)} entries, but the response has "
                f"{turn_count} turns (contiguous spans of generated tokens). Return one number per turn with "
                "verl_ext.per_turn([...]).",
                label=label,
            )
        lengths.append(len(entries))
        missing_entries = turn_count - len(entries)  # negative for a truncated response with too many entries
        padded += entries[:turn_count]
        padded += [0.0] * missing_entries
    return np.array(padded, dtype=np.float64), np.array(lengths, dtype=np.intp)


def _decode(value: object, *, text: bool) -> list[float] | None:
    """Return the numbers in a list or in its text, or None if the value is neither. With `text` it must be text."""
    if text and not isinstance(value, str):
        return None
    try:
        entries = json.loads(value) if isinstance(value, str) else value
        if not isinstance(entries, list) or any(isinstance(entry, str) for entry in entries):
            return None  # float() would read a text such as "1.0"
        return [float(entry) for entry in entries]
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _remedy(key: str, value: object) -> str:
    """Return what to do about a value that has no numbers per turn."""
    if isinstance(value, int | float | np.number):
        return (
            f"Remove {key!r} from algorithm.rewards.per_turn if the reward is one number per response. Otherwise "
            "return one number per turn with verl_ext.per_turn([...])."
        )
    return "Return verl_ext.per_turn([...]) with one number per turn."
