"""From a batch's rows to trajectories and back: padding left out, several outputs of one session counted once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl_ext.core.groups import Array, Bools, Groups, Index
from verl_ext.errors import DataError

HUGE = 2**21
"""Elements from which huge pages pay."""


@dataclass(frozen=True)
class Rows:
    """Which rows of a batch are whose.

    >>> rows = Rows.of_sessions(["a_0_0", "a_0_1", "pad_0_0"], np.array([False, False, True]))
    >>> rows.scored, rows.owner
    (array([1]), array([ 0,  0, -1]))
    """

    scored: Index
    """`[N]` the row whose score is the trajectory's."""
    owner: Index
    """`[B]` the trajectory of each row, -1 for padding."""
    plain: bool = False
    """Whether every row is a trajectory of its own."""

    @classmethod
    def of_padding(cls, padding: Bools) -> Rows:
        """Every row a trajectory, but for padding."""
        if not padding.any():
            every = np.arange(len(padding))
            return cls(every, every, plain=True)
        scored = np.flatnonzero(~padding)
        owner = np.where(padding, -1, np.cumsum(~padding) - 1)
        return cls(scored, owner)

    @classmethod
    def of_sessions(cls, keys: Sequence[str], padding: Bools) -> Rows:
        """Rows named `{uid}_{session}_{index}`: the highest index of a session is scored and speaks for the others."""
        if all(key.endswith("_0") for key in keys):  # one output a session
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

    def take(self, per_row: Array) -> Array:
        """The scored rows' values: `[B, ...] -> [N, ...]`."""
        return per_row if self.plain else per_row[self.scored]

    def labels(self, per_row: Sequence[Hashable]) -> list[Hashable]:
        """The scored rows' labels."""
        return list(per_row) if self.plain else [per_row[row] for row in self.scored.tolist()]

    def total(self, per_row: Array) -> Array:
        """Sum over all rows of each trajectory: `[B] -> [N]`."""
        if self.plain:
            return per_row
        real = self.owner >= 0
        return np.bincount(self.owner[real], weights=per_row[real]).astype(np.float64)

    def give(self, per_trajectory: Array) -> Array:
        """Each row its trajectory's value, padding 0: `[N] -> [B]`."""
        if self.plain:
            return per_trajectory
        return np.append(per_trajectory, 0.0)[self.owner]


def padding_by_uid(uids: Sequence[Hashable], groups: Groups, mask: torch.Tensor) -> Bools:
    """Rows that verl added to fill a batch: named `pad...`, and no token counts. `groups` are the rows by uid."""
    padding = np.zeros(len(uids), dtype=bool)
    distinct = [uids[row] for row in groups.firsts.tolist()]
    if "pad" in {uid[:3] for uid in distinct if isinstance(uid, str)}:
        for row in np.flatnonzero(token_counts(mask) == 0).tolist():
            uid = uids[row]
            padding[row] = isinstance(uid, str) and uid.startswith("pad")
    return padding


def token_counts(mask: torch.Tensor) -> Array:
    """`[B]` tokens that count of each row."""
    if mask.dtype == torch.bool and mask.device.type == "cpu":
        # torch takes about 30 times as long to sum bools as numpy takes for bytes. 255 ones still fit one byte.
        ones = mask.numpy().view(np.uint8)
        parts = np.add.reduceat(ones, np.arange(0, mask.shape[1], 255), axis=1, dtype=np.uint8)
        counts: Array = parts.sum(axis=1, dtype=np.float64)
        return counts
    narrow = mask.dtype.is_floating_point and mask.dtype.itemsize < 4  # bfloat16 counts to 256
    return mask.sum(dim=-1, dtype=torch.float32 if narrow else None).to(torch.float64).cpu().numpy()


def scores(token_level: torch.Tensor, mask: torch.Tensor) -> Array:
    """`[B]` sum of token-level scores over the whole response.

    The mask does not apply to finite values: the score of a multi-turn response may stand on a token which is not
    trained on. What is not finite behind the mask is no score at all.
    """
    narrow = token_level.dtype.itemsize < 4
    total: Array = token_level.sum(dim=-1, dtype=torch.float32 if narrow else None).double().cpu().numpy()
    if not np.isfinite(total).all():
        broken = ~np.isfinite(total)
        rows, seen = token_level[broken].double(), mask[broken].bool()
        kept = torch.where(seen | torch.isfinite(rows), rows, 0)
        found = kept.sum(dim=-1)
        # +inf and -inf, or either and NaN, would add up to NaN, which means "not scored".
        hidden = torch.isinf(kept).any(dim=-1) & torch.isnan(found)
        total[broken] = torch.where(hidden, torch.inf, found).cpu().numpy()
    return total


def broadcast(per_row: Array, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[B]` to `[B, L]`: the row's value on its tokens that count, exactly 0 elsewhere."""
    kind = dtype if dtype.is_floating_point else torch.float32
    if len(per_row) and np.abs(per_row).max() > torch.finfo(kind).max:
        raise DataError(
            f"an advantage of {per_row[np.abs(per_row).argmax()]:g} does not fit {kind}: scale the rewards down, by "
            "algorithm.rewards.weights for instance"
        )
    column = torch.from_numpy(np.ascontiguousarray(per_row)).to(device=mask.device, dtype=kind).unsqueeze(-1)
    large = mask.device.type == "cpu" and mask.numel() >= HUGE
    out = empty(mask.shape, kind) if large else torch.empty(mask.shape, dtype=kind, device=mask.device)
    # Convert first: multiplying floats by verl's int64 masks takes about three times as long as these two passes.
    out.copy_(mask)
    # The zeros turn -0.5 * 0, which is -0, into 0. A row of them is faster than a scalar or another pass.
    return torch.addcmul(out.new_zeros(1, mask.shape[1]), out, column, out=out)


def empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in memory of numpy's.

    numpy asks the kernel for huge pages, torch does not, and writing fresh memory costs mostly its page faults: at
    8192 x 8192 the one multiplication that fills the result takes a sixth of the time.
    """
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    size = shape.numel() * dtype.itemsize
    return torch.from_numpy(np.empty(size, dtype=np.uint8)).view(dtype).view(shape)
