"""The turns of responses: with per-turn rewards the rows of a batch are turns, and their values are returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from verl_ext.core.groups import Array, Bools, Index
from verl_ext.errors import DataError


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
        """Number the turns of responses, given the number of turns of each response.

        >>> Turns.of_counts([2, 1]).number
        array([0, 1, 0])
        """
        counts = np.asarray(counts, dtype=np.intp)
        if (counts < 1).any():
            raise DataError("Each response must have at least one turn. Use the count 1 for a response without tokens.")
        first_row_of_response = counts.cumsum() - counts
        first_row = first_row_of_response.repeat(counts)
        number = np.arange(len(first_row)) - first_row
        return cls(number, columns, discount)

    @cached_property
    def one_per_response(self) -> bool:
        """Whether each response has one turn, so that every row is a response."""
        return not self.number.any()

    @cached_property
    def response(self) -> Index:
        """`[N]` the response of each row."""
        begins = self.number == 0
        return np.cumsum(begins) - 1

    @cached_property
    def last(self) -> Bools:
        """`[N]` whether the row is its response's last turn, which is True for one row per response."""
        begins = self.number == 0
        # A turn is the last if the next row begins a response. The last row is followed by the first, which begins one.
        return np.roll(begins, -1)

    def returns(self, rewards: Array) -> Array:
        """Return `[N, K]` the returns of the rewards `[N, K]`."""
        # A reward of the response is discounted by the number of turns until its last turn.
        last_number = self.number[self.last][self.response]
        later_turns = last_number - self.number
        discounts = np.power(self.discount, later_turns, dtype=np.float64)
        returns: Array = rewards * discounts[:, None]
        # A per-turn reward is added to the discounted rewards of later turns.
        returns[:, self.columns] = self.discounted_sums(rewards[:, self.columns])
        return returns

    def discounted_sums(self, values: Array) -> Array:
        """Return for each turn the sum of its value and the discounted values of the response's later turns.

        `values` and the result have one row per turn: `[N]` or `[N, K]`. A value that only the last turn has is thus
        discounted to the earlier turns.

        >>> Turns(np.array([0, 1, 2, 0]), discount=0.5).discounted_sums(np.array([0.0, 0.0, 8.0, 1.0]))
        array([2., 4., 8., 1.])
        """
        sums: Array = values.copy()
        last_number = self.number.max(initial=0)
        for number in reversed(range(last_number)):
            # The sums of the turns `number + 1` are complete. They are in the next rows.
            rows = np.flatnonzero((self.number == number) & ~self.last)
            sums[rows] += self.discount * sums[rows + 1]
        return sums

    def response_weights(self, counted: Bools) -> Array:
        """Return `[N]` weights that sum to 1 per response: 1/n for each of its n rows in `counted`, 0 elsewhere."""
        if self.one_per_response:
            return counted.astype(np.float64)
        rows_of_response = np.bincount(self.response[counted], minlength=len(self.number))
        rows = rows_of_response[self.response]
        return np.divide(1.0, rows, out=np.zeros(len(rows)), where=counted)
