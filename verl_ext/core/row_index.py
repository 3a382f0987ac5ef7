"""Between verl's batch, with `B` rows of `L` tokens, and one number for each of its `T` trajectories.

`RowIndex` maps rows to trajectories and back: it skips padding, and counts the outputs of a session once. `TurnSpans`
finds the turns of trajectories in the response mask. The functions sum the tokens of each row, and write one number per
row or turn over the tokens of a mask.
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
        if one_output_per_session:  # the usual case, which needs no names
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


@dataclass(frozen=True)
class TurnSpans:
    """The token spans of the turns of `T` trajectories. A span is a maximal run of ones in the response mask.

    In this example the session `p_0` has one row with two turns, and the result of a tool is between them. The session
    `q_0` has two rows, and the batch holds the later one first. The session `r_0` has one row, which has no tokens. The
    sessions are the trajectories 0, 1 and 2.

    >>> keys = ["p_0_0", "q_0_1", "q_0_0", "r_0_0"]
    >>> mask = torch.tensor([
    ...     [1, 1, 0, 1],  # p_0_0: span 0 has two tokens, span 1 has one token
    ...     [1, 1, 1, 0],  # q_0_1: span 2
    ...     [0, 1, 0, 0],  # q_0_0: span 3
    ...     [0, 0, 0, 0],  # r_0_0: no span
    ... ])
    >>> rows = RowIndex.of_sessions(keys, padding=np.zeros(4, dtype=bool))
    >>> spans = TurnSpans.of(mask, rows)

    Spans are numbered as they stand in the mask. `bounds` has the begin and the end of each span in the flattened mask,
    where the four rows begin at 0, 4, 8 and 12:

    >>> spans.bounds.reshape(-1, 2).tolist()
    [[0, 2], [3, 4], [4, 7], [9, 10]]

    Turns are sorted by trajectory and, within a trajectory, in the order of generation. So span 3 comes before span 2.
    The trajectory 2 has no span, but it has one turn:

    >>> spans.span_of_turn.tolist()
    [0, 1, 3, 2, -1]
    >>> spans.trajectory_of_turn.tolist()
    [0, 0, 1, 1, 2]
    >>> spans.tokens(mask).tolist()
    [2.0, 1.0, 1.0, 3.0, 0.0]

    `outputs` counts the rows that begin with a turn. No row begins with the second turn of `p_0`, which continues a
    row:

    >>> spans.outputs.tolist()
    [1.0, 0.0, 1.0, 1.0, 1.0]

    A value per turn comes back onto tokens as runs in the flattened mask: 0 tokens before span 0, the 2 tokens of span
    0 with the value of turn 0, 1 token between the spans 0 and 1, and so on:

    >>> values, lengths = spans.span_values(np.array([10.0, 20.0, 30.0, 40.0, 50.0]), mask.numel())
    >>> values.tolist()
    [0.0, 10.0, 0.0, 20.0, 0.0, 40.0, 0.0, 30.0, 0.0]
    >>> lengths.tolist()
    [0, 2, 1, 1, 0, 3, 2, 1, 6]
    >>> write_over_mask(values, mask.float(), lengths).int()
    tensor([[10, 10,  0, 20],
            [40, 40, 40,  0],
            [ 0, 30,  0,  0],
            [ 0,  0,  0,  0]], dtype=torch.int32)

    Edge cases: a trajectory without a span has one turn without tokens. A span of padding belongs to no turn.
    """

    bounds: Index
    """`[2 S]` where each of the `S` spans begins and ends, in the flattened mask."""
    span_of_turn: Index
    """`[N]` the span of each turn, -1 for a turn without tokens. The turns are the segments of the core's `Batch`."""
    trajectory_of_turn: Index
    """`[N]` the trajectory of each turn. The turns of a trajectory follow one another."""
    outputs: Array
    """`[N]` number of rows that begin with the turn. A row without tokens belongs to its trajectory's first turn."""

    @classmethod
    def of(cls, mask: torch.Tensor, rows: RowIndex) -> TurnSpans:
        """Read the mask `[B, L]`. The rows of a trajectory are taken in the order in which they were generated."""
        bounds, row_of_span = _runs_of_ones(mask)
        spans_of_row: list[list[int]] = [[] for _ in range(len(mask))]
        for span, row in enumerate(row_of_span.tolist()):
            spans_of_row[row].append(span)
        span_of_turn: list[int] = []
        trajectory_of_turn: list[int] = []
        outputs: list[float] = []
        for trajectory, trajectory_rows in enumerate(rows.by_trajectory()):
            first_turn = len(span_of_turn)
            rows_without_tokens = 0
            for row in trajectory_rows:
                spans = spans_of_row[row]
                if spans:
                    span_of_turn += spans
                    outputs += [1.0] + [0.0] * (len(spans) - 1)  # the row begins with the turn of its first span
                else:
                    rows_without_tokens += 1
            if len(span_of_turn) == first_turn:  # the trajectory has no tokens
                span_of_turn.append(-1)
                outputs.append(0.0)
            outputs[first_turn] += rows_without_tokens
            turns = len(span_of_turn) - first_turn
            trajectory_of_turn += [trajectory] * turns
        return cls(
            bounds,
            np.array(span_of_turn, dtype=np.intp),
            np.array(trajectory_of_turn, dtype=np.intp),
            np.array(outputs, dtype=np.float64),
        )

    def tokens(self, mask: torch.Tensor) -> Array:
        """Return `[N]` the number of tokens of each turn in the loss.

        The mask `[B, L]` may have fewer ones than the mask from which the spans were read.
        """
        flat = mask.float().reshape(-1).cpu().numpy()
        if not len(self.bounds):
            return np.zeros(len(self.span_of_turn))
        # `reduceat` sums from each bound to the next, so the sums of spans and of the gaps after them alternate. It
        # does not accept the end of the mask as a bound. Without the last bound, the last span is summed to the end
        # of the mask, where no ones follow.
        tokens_of_span = np.add.reduceat(flat, self.bounds[:-1])[::2]
        # The -1 of a turn without tokens selects the 0 at the end.
        return np.append(tokens_of_span, 0.0)[self.span_of_turn]

    def span_values(self, per_turn: Array, size: int) -> tuple[Array, Index]:
        """Run-length encoding of the turns' values over the `size` tokens of the flattened mask: `(values, lengths)`.

        `np.repeat(values, lengths)` has a turn's value on each of its tokens and 0 between the turns.
        """
        has_tokens = self.span_of_turn >= 0
        value_of_span = np.zeros(len(self.bounds) // 2)
        value_of_span[self.span_of_turn[has_tokens]] = per_turn[has_tokens]
        # A gap comes before each span, and a last gap after all spans: `[2 S + 1]` runs.
        values = np.zeros(len(self.bounds) + 1)
        values[1::2] = value_of_span
        lengths = np.diff(self.bounds, prepend=0, append=size)
        return values, lengths


def _runs_of_ones(mask: torch.Tensor) -> tuple[Index, Index]:
    """Return `[2 S]` where the runs of ones in a mask `[B, L]` begin and end, and `[S]` the row of each run.

    The positions are those of the flattened mask.
    """
    # A 0 on each side of a row, so that every run begins and ends within its row: `[B, L + 2]`.
    framed = torch.nn.functional.pad(mask.bool(), (1, 1))
    # Where a run begins or ends: `[B, L + 1]`. Begins and ends alternate.
    changes = framed[:, 1:] != framed[:, :-1]
    row, column = changes.nonzero().cpu().numpy().T
    width = mask.shape[1]
    return row * width + column, row[::2]
