"""Map the rows of a batch to trajectories and back: skip padding, and count the outputs of a session once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl_ext.core.groups import Array, Bools, Groups, Index
from verl_ext.errors import DataError


@dataclass(frozen=True)
class RowIndex:
    """The trajectory of each row of a batch.

    >>> rows = RowIndex.of_sessions(["a_0_0", "a_0_1", "pad_0_0"], np.array([False, False, True]))
    >>> rows.scored, rows.owner
    (array([1]), array([ 0,  0, -1]))
    """

    scored: Index
    """`[N]` the row that carries the score of the trajectory."""
    owner: Index
    """`[B]` the trajectory of each row, -1 for padding."""
    order: Index
    """The rows without padding, sorted by trajectory and, within a trajectory, in the order of generation."""

    @property
    def one_to_one(self) -> bool:
        """Whether every row is its own trajectory. The trajectories are then in the order of the rows."""
        return len(self.scored) == len(self.owner)

    @property
    def outputs(self) -> Array:
        """`[N]` the number of rows of each trajectory."""
        return self.total(np.ones(len(self.owner)))

    @classmethod
    def of_groups(cls, groups: Groups, mask: torch.Tensor) -> RowIndex:
        """Make one trajectory per row of `groups`, which are the rows by uid.

        The padding that verl adds to fill a batch is excluded: its uid begins with `pad`, and its mask is empty.
        """
        named = [str(uid).startswith("pad") for uid in groups.labels]
        padding = groups.broadcast(np.array(named, dtype=bool))
        if padding.any():
            padding &= ~mask.bool().any(dim=-1).cpu().numpy()
        return cls.of_padding(padding)

    @classmethod
    def of_padding(cls, padding: Bools) -> RowIndex:
        """Make one trajectory per row, except for padding."""
        rows = np.flatnonzero(~padding)
        return cls(rows, np.where(padding, -1, np.cumsum(~padding) - 1), rows)

    @classmethod
    def of_sessions(cls, keys: Sequence[str], padding: Bools) -> RowIndex:
        """Make one trajectory per session. The rows are named `{uid}_{session}_{index}`.

        The last output of a session carries the reward. All outputs of the session get the same advantage.
        """
        if all(key.endswith("_0") for key in keys):  # one output per session
            return cls.of_padding(padding)
        numbers: dict[str, int] = {}
        outputs = []
        for row in np.flatnonzero(~padding).tolist():
            session, _, index = keys[row].rpartition("_")
            if not index.isdecimal():
                raise DataError(
                    f"The row {row} is named {keys[row]!r}, expected '<uid>_<session>_<number of the output>'. Use "
                    "verl's naming scheme in the trainer that writes the rows."
                )
            outputs.append((numbers.setdefault(session, len(numbers)), int(index), row))
        owners, _, order = np.array(sorted(outputs), dtype=np.intp).reshape(-1, 3).T
        owner = np.full(len(keys), -1, dtype=np.intp)
        owner[order] = owners
        return cls(order[np.diff(owners, append=-1) != 0], owner, order)

    def gather(self, per_row: Array) -> Array:
        """Select the values of the scored rows: `[B, ...] -> [N, ...]`."""
        return per_row[self.scored]

    def labels(self, per_row: Sequence[Hashable]) -> list[Hashable]:
        """Select the labels of the scored rows."""
        return [per_row[row] for row in self.scored.tolist()]

    def total(self, per_row: Array) -> Array:
        """Sum over the rows of each trajectory: `[B] -> [N]`."""
        real = self.owner >= 0
        return np.bincount(self.owner[real], weights=per_row[real]).astype(np.float64)

    def scatter(self, per_trajectory: Array) -> Array:
        """Broadcast the value of each trajectory to its rows, 0 to padding: `[N] -> [B]`."""
        return np.append(per_trajectory, 0.0)[self.owner]


def uids_of(keys: Sequence[str]) -> list[str]:
    """Return the uid of each row, from its name `{uid}_{session}_{index}`.

    >>> uids_of(["p_1_0_0"])
    ['p_1']
    """
    return [key.rsplit("_", 2)[0] for key in keys]


def float_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask as floats in new memory. torch is very slow at multiplying verl's int64 masks by floats."""
    return mask.to(dtype if dtype.is_floating_point else torch.float32, copy=True).detach()


def scores(token_level: torch.Tensor, mask: torch.Tensor) -> Array:
    """Return `[B]` the sum of the token-level scores over the whole response.

    Finite values outside the mask count, because a multi-turn response may have its score on a token that is not
    trained on. Values outside the mask that are not finite are ignored.
    """
    token_level = token_level.detach()
    total = row_sums(token_level)
    broken = ~np.isfinite(total)
    if broken.any():
        rows, seen = token_level[broken].double(), mask[broken].bool()
        kept = torch.where(seen | torch.isfinite(rows), rows, 0)
        sums = kept.sum(dim=-1)
        # inf with -inf or NaN adds up to NaN, which would mean "not scored": report inf.
        hidden = torch.isinf(kept).any(dim=-1) & torch.isnan(sums)
        total[broken] = torch.where(hidden, torch.inf, sums).cpu().numpy()
    return total


def dense(values: torch.Tensor) -> torch.Tensor:
    """Return a field with one value per token, nested or padded, as a tensor padded with 0."""
    return values.to_padded_tensor(0) if values.is_nested else values


def row_sums(values: torch.Tensor) -> Array:
    """Return `[B]` the sum of each row, which for a float mask is the number of tokens."""
    narrow = values.dtype.itemsize < 4  # bfloat16 is exact only up to 256
    return values.sum(dim=-1, dtype=torch.float32 if narrow else None).cpu().numpy().astype(np.float64)


def broadcast(values: Array, mask: torch.Tensor, counts: Index | None = None) -> torch.Tensor:
    """Write each row's value over a float mask `[B, L]`, in place: the value inside the mask, exactly 0 outside.

    With `counts` each value belongs to a span of that many tokens, row after row.
    """
    kind = mask.dtype
    if (np.abs(values) > torch.finfo(kind).max).any():
        raise DataError(
            f"An advantage of {values[np.abs(values).argmax()]:g} is too large for {kind}. Set smaller "
            "algorithm.rewards.weights, or return smaller rewards."
        )
    narrow = values if kind == torch.float64 else values.astype(np.float32)
    column = narrow[:, None] if counts is None else narrow.repeat(counts).reshape(mask.shape)
    # Adding 0 turns -0 (-0.5 * 0) into 0. One row of zeros is faster than a scalar or another pass.
    return torch.addcmul(mask.new_zeros(1, mask.shape[1]), mask, torch.from_numpy(column).to(mask), out=mask)
