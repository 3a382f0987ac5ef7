"""Per-turn rewards: the rows of a batch are turns of responses, and their values are returns."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ext.core.groups import Array, Bools, Index, label_text
from verl_ext.errors import DataError

if TYPE_CHECKING:
    import torch

    from verl_ext.core.row_index import RowIndex


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
    return json.dumps([float(entry) for entry in entries])


def pad_entries(
    key: str, labels: Sequence[Hashable], lists: Sequence[Any], counts: Index, cut: Bools, *, text: bool
) -> tuple[Array, Index]:
    """Pad each response's list with 0 to its number of turns, and concatenate. Also return the lengths before padding.

    With `text` a list must be what `per_turn` returns. `cut` says whether a response was truncated at its length limit.
    The list of a truncated response may be longer than its number of turns, and is truncated as well. Any other list
    that is too long is an error.

    >>> pad_entries("tool", ["p", "q"], ["[1.0]", "[2, 3]"], np.array([2, 1]), np.array([False, True]), text=True)
    (array([1., 0., 2.]), array([1, 2]))
    """
    rewards, given_to = [], []
    for label, value, count, was_cut in zip(labels, lists, counts.tolist(), cut.tolist(), strict=True):
        entries: Any = None
        with suppress(TypeError, ValueError, OverflowError, RecursionError):
            given = json.loads(value) if isinstance(value, str) else value
            entries = list(map(float, given)) if isinstance(given, list) else None
        if entries is None or (text and given is value):
            raise DataError(
                f"The reward {key!r} of {label_text(label)} is {reprlib.repr(value)}, but algorithm.rewards.per_turn "
                f"names {key!r}, so it must have one number per turn. {_remedy(key, value)}",
                label=label,
            )
        if len(entries) > count and not was_cut:
            raise DataError(
                f"The reward {key!r} of {label_text(label)} has {len(entries)} entries, but the response has {count} "
                "turns (contiguous spans of generated tokens). Return one number per turn with "
                "verl_ext.per_turn([...]).",
                label=label,
            )
        given_to.append(len(entries))
        rewards += (entries + [0.0] * count)[:count]
    return np.array(rewards), np.array(given_to, dtype=np.intp)


def _remedy(key: str, value: object) -> str:
    """Return what to do about a value that has no numbers per turn."""
    if isinstance(value, int | float | np.number):
        return (
            f"Remove {key!r} from algorithm.rewards.per_turn if the reward is one number per response. Otherwise "
            "return one number per turn with verl_ext.per_turn([...])."
        )
    return "Return verl_ext.per_turn([...]) with one number per turn."


@dataclass(frozen=True)
class Turns:
    """The turn number of each row. The turns of a response are consecutive rows, numbered from 0.

    The return of a per-turn reward is `G_itk = sum_{s >= t} discount^(s - t) r_isk`. A reward of the response is
    received at its last turn `T_i`, so its return is `discount^(T_i - t) R_ik`. A return is not scored if one of its
    rewards is not scored.

    >>> turns = Turns(np.array([0, 1, 0]), columns=(0,), discount=0.5)
    >>> turns.returns(np.array([[1.0, 8.0], [2.0, 8.0], [5.0, 3.0]]))
    array([[2., 4.],
           [2., 8.],
           [5., 3.]])
    """

    number: Index
    """`[N]` the turn number of each row."""
    columns: tuple[int, ...] = ()
    """The columns of per-turn rewards. The other columns repeat the reward of the response."""
    discount: float = 1.0

    def __post_init__(self) -> None:
        if ((self.number != 0) & (self.number != np.append(-1, self.number[:-1]) + 1)).any():
            raise DataError(
                "The turn numbers of a response must be 0, 1, 2, ... in consecutive rows. Use Turns.of_counts([...]) "
                "with the number of turns of each response."
            )

    @classmethod
    def of_counts(cls, counts: Sequence[int] | Index, columns: tuple[int, ...] = (), discount: float = 1.0) -> Turns:
        """Number the turns of responses, given the number of turns of each response.

        >>> Turns.of_counts([2, 1]).number
        array([0, 1, 0])
        """
        counts = np.asarray(counts, dtype=np.intp)
        first = np.repeat(counts.cumsum() - counts, counts)
        return cls(np.arange(len(first)) - first, columns, discount)

    @cached_property
    def response(self) -> Index:
        """`[N]` the response of each row."""
        return np.cumsum(self.number == 0) - 1

    @cached_property
    def last(self) -> Bools:
        """`[N]` whether the row is its response's last turn, which is True for one row per response."""
        return np.append(self.number[1:] == 0, True)[: len(self.number)]

    def returns(self, rewards: Array) -> Array:
        """Return `[N, K]` the returns, which are the rewards themselves if each response has one turn."""
        if self.last.all():
            return rewards
        left = self.number[self.last][self.response] - self.number
        returns: Array = rewards * np.power(self.discount, left, dtype=np.float64)[:, None]
        summed = rewards[:, self.columns]
        for number in range(int(self.number.max()) - 1, -1, -1):
            rows = np.flatnonzero((self.number == number) & ~self.last)
            summed[rows] += self.discount * summed[rows + 1]
        returns[:, self.columns] = summed
        return returns

    def response_weights(self, counted: Bools) -> Array:
        """Return `[N]` weights that sum to 1 per response: 1/n for each of its n rows in `counted`, 0 elsewhere."""
        if self.last.all():
            return counted.astype(np.float64)
        rows = np.bincount(self.response[counted], minlength=len(self.number))[self.response]
        return np.divide(1.0, rows, out=np.zeros(len(rows)), where=counted)


@dataclass(frozen=True)
class TurnSpans:
    """The token spans of the turns of `N` trajectories. A span is a maximal run of ones in the response mask.

    A trajectory without such a run has one turn without tokens.
    """

    bounds: Index
    """`[2 S]` where each of the `S` spans begins and ends, in the flattened mask."""
    span: Index
    """`[M]` the span of each turn, -1 for one without tokens."""
    owner: Index
    """`[M]` the trajectory of each turn; the turns of a trajectory follow one another."""
    outputs: Array
    """`[M]` number of rows that begin with the turn. A row without tokens belongs to the first turn."""

    @classmethod
    def of(cls, mask: torch.Tensor, rows: RowIndex) -> TurnSpans:
        """Read the mask `[B, L]`; the rows of a trajectory are taken in the order in which they were written.

        >>> import torch
        >>> from verl_ext.core.row_index import RowIndex
        >>> spans = TurnSpans.of(torch.tensor([[1, 0, 1], [0, 1, 1]]), RowIndex.of_padding(np.zeros(2, dtype=bool)))
        >>> spans.bounds.tolist(), spans.owner
        ([0, 1, 2, 3, 4, 6], array([0, 0, 1]))
        """
        size, width = mask.shape
        inside = mask.bool().new_zeros(size, width + 2)
        inside[:, 1:-1] = mask
        place, column = (inside[:, 1:] != inside[:, :-1]).nonzero().cpu().numpy().T
        rank = np.zeros(size, dtype=np.intp)
        rank[rows.order] = np.arange(len(rows.order))
        # Sort the spans, without those of padding, by trajectory, and within one as its rows were written.
        row = place[::2]  # of each span
        span = np.flatnonzero(rows.owner[row] >= 0)
        span = span[np.argsort(rank[row[span]], kind="stable")]
        owner, first = rows.owner[row[span]], np.diff(row[span], prepend=-1) != 0
        # A trajectory without tokens gets a turn, at its place among the others.
        empty = np.setdiff1d(np.arange(len(rows.scored)), owner)
        places = np.searchsorted(owner, empty)
        span, owner = np.insert(span, places, -1), np.insert(owner, places, empty)
        # A row belongs to the turn of its first span; one without tokens to its trajectory's first turn.
        outputs = np.insert(first, places, False).astype(np.float64)
        outputs[np.diff(owner, prepend=-1) != 0] += rows.outputs - np.bincount(owner, outputs)
        return cls(place * width + column, span, owner, outputs)

    def tokens(self, mask: torch.Tensor) -> Array:
        """Return `[M]` the number of tokens of each turn in the loss.

        The float mask `[B, L]` may have fewer ones than the mask from which the spans were read.
        """
        flat, starts = mask.float().reshape(-1).cpu().numpy(), self.bounds[:-1]
        per_span = np.add.reduceat(flat, starts)[::2] if len(starts) else np.zeros(0)
        return np.append(per_span, 0.0)[self.span]

    def span_values(self, per_turn: Array, size: int) -> tuple[Array, Index]:
        """Run-length encoding of the turns' values over the `size` tokens of the flattened mask: `(values, lengths)`.

        `np.repeat(values, lengths)` has a turn's value on each of its tokens and 0 between the turns.
        """
        values, kept = np.zeros(len(self.bounds) + 1), self.span >= 0
        values[1::2][self.span[kept]] = per_turn[kept]
        return values, np.diff(self.bounds, prepend=0, append=size)
