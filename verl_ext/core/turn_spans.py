"""Where the turns of trajectories are in the response mask: from a mask to turns, and from turns back to tokens.

A turn is a span of ones in the mask. In this example the session `p_0` has one row with two turns, and the result of a
tool is between them. The session `q_0` has two rows, and the batch holds the later one first. The session `r_0` has one
row, which has no tokens. The sessions are the trajectories 0, 1 and 2.

>>> from verl_ext.core.row_index import write_over_mask
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

Turns are sorted by trajectory and, within a trajectory, in the order of generation. So span 3 comes before span 2. The
trajectory 2 has no span, but it has one turn:

>>> spans.span_of_turn.tolist()
[0, 1, 3, 2, -1]
>>> spans.trajectory_of_turn.tolist()
[0, 0, 1, 1, 2]
>>> spans.tokens(mask).tolist()
[2.0, 1.0, 1.0, 3.0, 0.0]

`outputs` counts the rows that begin with a turn. No row begins with the second turn of `p_0`, which continues a row:

>>> spans.outputs.tolist()
[1.0, 0.0, 1.0, 1.0, 1.0]

A value per turn comes back onto tokens as runs in the flattened mask: 0 tokens before span 0, the 2 tokens of span 0
with the value of turn 0, 1 token between the spans 0 and 1, and so on:

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
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from verl_ext.core.groups import Array, Index
from verl_ext.core.row_index import RowIndex


@dataclass(frozen=True)
class TurnSpans:
    """The token spans of the turns of `T` trajectories. A span is a maximal run of ones in the response mask.

    The module's docstring has an example of every field.

    Edge cases: a trajectory without such a run has one turn without tokens. A span of padding belongs to no turn.
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
