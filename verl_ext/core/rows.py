"""Map the rows of a batch to trajectories and back: skip padding, count the outputs of one session once."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl_ext.core.groups import Array, Bools, Groups, Index
from verl_ext.errors import DataError

LARGE = 2**19
"""The number of elements of a tensor from which huge pages make it faster to write."""

HUGE_PAGE = 2**21
"""Bytes of a huge page of memory on most processors."""


@dataclass(frozen=True)
class Rows:
    """The trajectory of each row of a batch.

    >>> rows = Rows.of_sessions(["a_0_0", "a_0_1", "pad_0_0"], np.array([False, False, True]))
    >>> rows.scored, rows.owner
    (array([1]), array([ 0,  0, -1]))
    """

    scored: Index
    """`[N]` the row that carries the score of the trajectory."""
    owner: Index
    """`[B]` the trajectory of each row, -1 for padding."""
    plain: bool = False
    """Whether every row is its own trajectory, in order."""

    @classmethod
    def of_groups(cls, groups: Groups, mask: torch.Tensor) -> Rows:
        """One trajectory per row, except padding, by which verl fills a batch: a uid `pad...` and no token in the mask.

        `groups` are the rows by uid.
        """
        padded = [group for group, uid in enumerate(groups.labels) if isinstance(uid, str) and uid.startswith("pad")]
        if not padded:
            return cls._every(len(groups.ids))
        no_tokens: Bools = ~mask.bool().any(dim=-1).cpu().numpy()
        return cls.of_padding(no_tokens & np.isin(groups.ids, padded))

    @classmethod
    def of_padding(cls, padding: Bools) -> Rows:
        """One trajectory per row, except padding."""
        if not padding.any():
            return cls._every(len(padding))
        scored = np.flatnonzero(~padding)
        owner = np.where(padding, -1, np.cumsum(~padding) - 1)
        return cls(scored, owner)

    @classmethod
    def of_sessions(cls, keys: Sequence[str], padding: Bools) -> Rows:
        """One trajectory per session; the rows are named `{uid}_{session}_{index}`.

        The last output of a session carries the reward; the others share its advantage.
        """
        if all(key.endswith("_0") for key in keys):  # one output per session
            return cls.of_padding(padding)
        parts = [key.rpartition("_") for key in keys]
        sessions: dict[str, int] = {}
        owner = np.full(len(keys), -1, dtype=np.intp)
        last: list[tuple[int, int]] = []
        for row in np.flatnonzero(~padding).tolist():
            session, _, index = parts[row]
            if not index.isdecimal():
                raise DataError(f"row {row} is named {keys[row]!r}, expected '<uid>_<session>_<number of the output>'")
            number = owner[row] = sessions.setdefault(session, len(sessions))
            if number == len(last):
                last.append((int(index), row))
            elif last[number] < (int(index), row):
                last[number] = (int(index), row)
        return cls(np.array([row for _, row in last], dtype=np.intp), owner)

    @classmethod
    def _every(cls, size: int) -> Rows:
        every = np.arange(size)
        return cls(every, every, plain=True)

    def take(self, per_row: Array) -> Array:
        """Select the values of the scored rows: `[B, ...] -> [N, ...]`."""
        return per_row if self.plain else per_row[self.scored]

    def labels(self, per_row: Sequence[Hashable]) -> list[Hashable]:
        """Select the labels of the scored rows."""
        return list(per_row) if self.plain else [per_row[row] for row in self.scored.tolist()]

    def total(self, per_row: Array) -> Array:
        """Sum over the rows of each trajectory: `[B] -> [N]`."""
        if self.plain:
            return per_row
        real = self.owner >= 0
        return np.bincount(self.owner[real], weights=per_row[real]).astype(np.float64)

    def give(self, per_trajectory: Array) -> Array:
        """Broadcast the value of each trajectory to its rows, 0 to padding: `[N] -> [B]`."""
        if self.plain:
            return per_trajectory
        return np.append(per_trajectory, 0.0)[self.owner]


def float_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask as floats, in new memory: verl's masks are int64, which torch multiplies by floats very slowly."""
    kind = dtype if dtype.is_floating_point else torch.float32
    large = mask.device.type == "cpu" and mask.numel() >= LARGE
    out = empty(mask.shape, kind) if large else torch.empty(mask.shape, dtype=kind, device=mask.device)
    return out.copy_(mask).detach()


def token_counts(mask: torch.Tensor) -> Array:
    """`[B]` number of tokens in a mask of floats, per row."""
    narrow = mask.dtype.itemsize < 4  # bfloat16 is exact only up to 256
    return mask.sum(dim=-1, dtype=torch.float32 if narrow else None).cpu().numpy().astype(np.float64)


def scores(token_level: torch.Tensor, mask: torch.Tensor) -> Array:
    """`[B]` sum of token-level scores over the whole response.

    Finite values outside the mask count: a multi-turn response may have its score on a token that is not trained on.
    Values outside the mask that are not finite are ignored.
    """
    token_level = token_level.detach()
    narrow = token_level.dtype.itemsize < 4
    total: Array = token_level.sum(dim=-1, dtype=torch.float32 if narrow else None).cpu().numpy().astype(np.float64)
    if not math.isfinite(np.add.reduce(total)):
        broken = ~np.isfinite(total)
        rows, seen = token_level[broken].double(), mask[broken].bool()
        kept = torch.where(seen | torch.isfinite(rows), rows, 0)
        sums = kept.sum(dim=-1)
        # inf with -inf or NaN adds up to NaN, which would mean "not scored": report inf.
        hidden = torch.isinf(kept).any(dim=-1) & torch.isnan(sums)
        total[broken] = torch.where(hidden, torch.inf, sums).cpu().numpy()
    return total


def broadcast(per_row: Array, mask: torch.Tensor) -> torch.Tensor:
    """Broadcast `[B]` over a mask of floats `[B, L]` in place: the row's value inside the mask, exactly 0 outside."""
    kind = mask.dtype
    if np.maximum.reduce(np.abs(per_row), initial=0.0) > torch.finfo(kind).max:
        raise DataError(
            f"an advantage of {per_row[np.abs(per_row).argmax()]:g} does not fit {kind}: scale the rewards down, for "
            "example with algorithm.rewards.weights"
        )
    narrow = per_row if kind == torch.float64 else per_row.astype(np.float32)
    column = torch.from_numpy(narrow)[:, None].to(mask)
    # Adding 0 turns -0 (-0.5 * 0) into 0. One row of zeros is faster than a scalar or another pass.
    return torch.addcmul(mask.new_zeros(1, mask.shape[1]), mask, column, out=mask)


def empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in memory that numpy allocated, from the beginning of a huge page.

    numpy asks the kernel for huge pages, torch does not. Page faults are most of the cost of writing fresh memory: with
    huge pages the result is filled in less than half of the time. Memory that does not begin at one has small pages at
    both ends, which for 4 MB are half of it.
    """
    size = shape.numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    memory = np.empty(size + HUGE_PAGE, dtype=np.uint8)
    start = -memory.ctypes.data % HUGE_PAGE
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
