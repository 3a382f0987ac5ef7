"""Rewards by turn: the rows of a batch are then turns of responses, and their values the returns still to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from verl_ext.core.groups import Array, Bools, Index
from verl_ext.errors import DataError


@dataclass(frozen=True)
class Turns:
    """Which turn of a response each row is. The turns of a response follow one another, from 0.

    `G_itk = sum_{s >= t} discount^(s - t) r_isk` for a reward by turn, and `discount^(T_i - t) R_ik` for a reward of
    the response, which is earned at its last turn `T_i`. A return with an entry that is not scored is not scored.

    >>> turns = Turns(np.array([0, 1, 0]), by_turn=(0,), discount=0.5)
    >>> turns.returns(np.array([[1.0, 8.0], [2.0, 8.0], [5.0, 3.0]]))
    array([[2., 4.],
           [2., 8.],
           [5., 3.]])
    """

    number: Index
    """`[N]` the number of each row's turn."""
    by_turn: tuple[int, ...] = ()
    """The columns of the rewards that have an entry for each turn; the others repeat the response's."""
    discount: float = 1.0

    def __post_init__(self) -> None:
        if ((self.number != 0) & (self.number != np.append(-1, self.number[:-1]) + 1)).any():
            raise DataError("the turns of a response must follow one another, each with its number, from 0")

    @classmethod
    def of_counts(cls, counts: Sequence[int] | Index, by_turn: tuple[int, ...] = (), discount: float = 1.0) -> Turns:
        """The turns of responses with so many turns each.

        >>> Turns.of_counts([2, 1]).number
        array([0, 1, 0])
        """
        counts = np.asarray(counts, dtype=np.intp)
        first = np.repeat(counts.cumsum() - counts, counts)
        return cls(np.arange(len(first)) - first, by_turn, discount)

    @cached_property
    def response(self) -> Index:
        """`[N]` the response of each row."""
        response: Index = (self.number == 0).cumsum() - 1
        return response

    @cached_property
    def last(self) -> Bools:
        """`[N]` whether the row is its response's last turn: one row for each response."""
        return np.append(self.number[1:] == 0, True)[: len(self.number)]

    @cached_property
    def discounts(self) -> Array:
        """`[N]` what a reward that is earned at the response's last turn counts at each turn."""
        left = self.number[self.last][self.response] - self.number
        discounts: Array = np.power(self.discount, left, dtype=np.float64)
        return discounts

    def returns(self, rewards: Array) -> Array:
        """`[N, K]` the returns; the rewards themselves where each response has one turn."""
        if self.last.all():
            return rewards
        returns = rewards * self.discounts[:, None]
        summed = rewards[:, self.by_turn]
        for number in range(int(self.number.max()) - 1, -1, -1):
            rows = np.flatnonzero((self.number == number) & ~self.last)
            summed[rows] += self.discount * summed[rows + 1]
        returns[:, self.by_turn] = summed
        returns.setflags(write=False)
        return returns

    def once(self, counted: Bools) -> Array:
        """`[N]` the weight with which each response counts once: 1 by the number of its rows that are counted."""
        rows = np.bincount(self.response[counted], minlength=len(self.number))[self.response]
        return np.divide(1.0, rows, out=np.zeros(len(rows)), where=counted)
