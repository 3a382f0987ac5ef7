"""Between verl's batch, with `B` rows of `L` tokens, and one number for each of its `T` trajectories.

`RowIndex` maps rows to trajectories and back: it skips padding, and counts the outputs of a session once. The functions
below it sum the tokens of each row, and write one number per row over the tokens of a mask.
"""

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
    >>> rows.scored, rows.trajectory_of_row
    (array([1]), array([ 0,  0, -1]))
    """

    scored: Index
    """`[T]` the row that carries the score of the trajectory."""
    trajectory_of_row: Index
    """`[B]` the trajectory of each row, -1 for padding."""
    order: Index
    """The rows without padding, sorted by trajectory and, within a trajectory, in the order of generation."""

    @property
    def one_to_one(self) -> bool:
        """Whether every row is its own trajectory. The trajectories are then in the order of the rows."""
        return len(self.scored) == len(self.trajectory_of_row)

    @property
    def outputs(self) -> Array:
        """`[T]` the number of rows of each trajectory."""
        rows = np.ones(len(self.trajectory_of_row))
        return self.total(rows)

    @classmethod
    def of_groups(cls, groups: Groups, mask: torch.Tensor) -> RowIndex:
        """Make one trajectory per row of `groups`, which are the rows by uid.

        The padding that verl adds to fill a batch is excluded: its uid begins with `pad`, and its mask is empty.
        """
        named_as_padding = [str(uid).startswith("pad") for uid in groups.labels]
        padding = groups.broadcast(np.array(named_as_padding, dtype=bool))
        if padding.any():
            has_tokens = mask.bool().any(dim=-1).cpu().numpy()
            padding &= ~has_tokens
        return cls.of_padding(padding)

    @classmethod
    def of_padding(cls, padding: Bools) -> RowIndex:
        """Make one trajectory per row, except for padding."""
        rows = np.flatnonzero(~padding)
        trajectory_of_row = np.full(len(padding), -1, dtype=np.intp)
        trajectory_of_row[rows] = np.arange(len(rows))
        return cls(rows, trajectory_of_row, rows)

    @classmethod
    def of_sessions(cls, keys: Sequence[str], padding: Bools) -> RowIndex:
        """Make one trajectory per session. The rows are named `{uid}_{session}_{index}`.

        The last output of a session carries the reward. All outputs of the session get the same advantage.
        """
        one_output_per_session = all(key.endswith("_0") for key in keys)
        if one_output_per_session:
            return cls.of_padding(padding)
        outputs_of_session: dict[str, list[tuple[int, int]]] = {}  # each output as its number and its row
        for row in np.flatnonzero(~padding).tolist():
            session, _, number = keys[row].rpartition("_")
            if not number.isdecimal():
                raise DataError(
                    f"The row {row} is named {keys[row]!r}, expected '<uid>_<session>_<number of the output>'. Use "
                    "verl's naming scheme in the trainer that writes the rows."
                )
            outputs_of_session.setdefault(session, []).append((int(number), row))
        trajectory_of_row = np.full(len(keys), -1, dtype=np.intp)
        scored: list[int] = []
        order: list[int] = []
        for trajectory, outputs in enumerate(outputs_of_session.values()):
            rows = [row for _, row in sorted(outputs)]
            trajectory_of_row[rows] = trajectory
            scored.append(rows[-1])
            order += rows
        return cls(np.array(scored, dtype=np.intp), trajectory_of_row, np.array(order, dtype=np.intp))

    def by_trajectory(self) -> list[list[int]]:
        """Return the rows of each trajectory, in the order of generation."""
        rows_of_trajectory: list[list[int]] = [[] for _ in self.scored]
        for row in self.order.tolist():
            trajectory = self.trajectory_of_row[row]
            rows_of_trajectory[trajectory].append(row)
        return rows_of_trajectory

    def gather(self, per_row: Array) -> Array:
        """Select the values of the scored rows: `[B, ...] -> [T, ...]`."""
        return per_row[self.scored]

    def labels(self, per_row: Sequence[Hashable]) -> list[Hashable]:
        """Select the labels of the scored rows."""
        return [per_row[row] for row in self.scored.tolist()]

    def total(self, per_row: Array) -> Array:
        """Sum over the rows of each trajectory: `[B] -> [T]`."""
        is_real = self.trajectory_of_row >= 0
        totals = np.bincount(self.trajectory_of_row[is_real], weights=per_row[is_real])
        return totals.astype(np.float64)  # `bincount` of no rows returns integers

    def scatter(self, per_trajectory: Array) -> Array:
        """Broadcast the value of each trajectory to its rows, 0 to padding: `[T] -> [B]`."""
        # The -1 of padding selects the 0 at the end.
        return np.append(per_trajectory, 0.0)[self.trajectory_of_row]


def uids_of(keys: Sequence[str]) -> list[str]:
    """Return the uid of each row, from its name `{uid}_{session}_{index}`.

    >>> uids_of(["p_1_0_0"])
    ['p_1']
    """
    return [key.rsplit("_", 2)[0] for key in keys]


def float_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask as floats in new memory. torch is very slow at multiplying verl's int64 masks by floats."""
    float_type = dtype if dtype.is_floating_point else torch.float32
    return mask.to(float_type, copy=True).detach()


def scores(token_level: torch.Tensor, mask: torch.Tensor) -> Array:
    """Return `[B]` the sum of the token-level scores over the whole response.

    Finite values outside the mask count, because a multi-turn response may have its score on a token that is not
    trained on. Values outside the mask that are not finite are ignored.
    """
    token_level = token_level.detach()
    total = row_sums(token_level)
    not_finite = ~np.isfinite(total)
    if not_finite.any():
        total[not_finite] = _sums_of_valid(token_level[not_finite], mask[not_finite])
    return total


def _sums_of_valid(token_level: torch.Tensor, mask: torch.Tensor) -> Array:
    """Return the sum of the valid values of each row, which are those that are inside the mask or finite."""
    values = token_level.double()
    is_valid = mask.bool() | torch.isfinite(values)
    valid_values = torch.where(is_valid, values, 0)
    sums = valid_values.sum(dim=-1)
    # The sum of inf with -inf or NaN is NaN, which would mean "not scored". Report inf instead.
    has_infinity = torch.isinf(valid_values).any(dim=-1)
    is_wrong = has_infinity & torch.isnan(sums)
    return torch.where(is_wrong, torch.inf, sums).cpu().numpy()


def dense(values: torch.Tensor) -> torch.Tensor:
    """Return a field with one value per token, nested or padded, as a tensor padded with 0."""
    return values.to_padded_tensor(0) if values.is_nested else values


def row_sums(values: torch.Tensor) -> Array:
    """Return `[B]` the sum of each row, which for a float mask is the number of tokens."""
    is_narrow = values.dtype.itemsize < 4  # bfloat16 counts exactly only up to 256
    sums = values.sum(dim=-1, dtype=torch.float32 if is_narrow else None)
    return sums.cpu().numpy().astype(np.float64)


def write_over_mask(values: Array, mask: torch.Tensor, lengths: Index | None = None) -> torch.Tensor:
    """Write each row's value over a float mask `[B, L]`, in place: the value inside the mask, exactly 0 outside.

    With `lengths` each value belongs to a span of that many tokens of the flattened mask.
    """
    magnitudes = np.abs(values)
    if (magnitudes > torch.finfo(mask.dtype).max).any():
        largest = values[magnitudes.argmax()]
        raise DataError(
            f"An advantage of {largest:g} is too large for {mask.dtype}. Set smaller "
            "algorithm.rewards.weights, or return smaller rewards."
        )
    if mask.dtype != torch.float64:
        values = values.astype(np.float32)
    # `[B, 1]`, which torch broadcasts to the tokens of a row, or with `lengths` `[B, L]`.
    per_token = values[:, None] if lengths is None else values.repeat(lengths).reshape(mask.shape)
    factors = torch.from_numpy(per_token).to(mask)
    # Adding 0 turns -0 (-0.5 * 0) into 0. One row of zeros is faster than a scalar or another pass.
    zeros = mask.new_zeros(1, mask.shape[1])
    return torch.addcmul(zeros, mask, factors, out=mask)
