"""The turns in a response mask, against plain loops over the tokens of each session."""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.core.row_index import RowIndex, TurnSpans, write_over_mask

WIDTH = 9


@dataclass
class Turn:
    """A turn as plain loops find it."""

    trajectory: int
    row: int
    tokens: list[int]
    outputs: int
    """The number of rows that begin with the turn. A row without tokens belongs to the first turn of its session."""


def runs_of_ones(mask_row: list[int]) -> list[list[int]]:
    """Return the tokens of each run of ones in a row of the mask."""
    runs: list[list[int]] = []
    for token, inside in enumerate(mask_row):
        if inside:
            continues = token > 0 and mask_row[token - 1]
            if not continues:
                runs.append([])
            runs[-1].append(token)
    return runs


def rows_by_session(keys: list[str]) -> dict[str, list[int]]:
    """Return the rows of each session in the order of their output numbers. Padding is left out."""
    rows: dict[str, dict[int, int]] = {}
    for row, key in enumerate(keys):
        session, _, output = key.rpartition("_")
        if not key.startswith("pad"):
            rows.setdefault(session, {})[int(output)] = row
    return {session: [row for _, row in sorted(row_of_output.items())] for session, row_of_output in rows.items()}


def turns_by_loops(keys: list[str], mask: torch.Tensor) -> list[Turn]:
    """Return the turns of all sessions. A session without tokens has one turn."""
    turns: list[Turn] = []
    for trajectory, rows in enumerate(rows_by_session(keys).values()):
        turns_of_session: list[Turn] = []
        rows_without_tokens = 0
        for row in rows:
            runs = runs_of_ones(mask[row].tolist())
            if not runs:
                rows_without_tokens += 1
            for index, tokens in enumerate(runs):
                turns_of_session.append(Turn(trajectory, row, tokens, outputs=1 if index == 0 else 0))
        if not turns_of_session:
            turns_of_session.append(Turn(trajectory, rows[0], [], outputs=0))
        turns_of_session[0].outputs += rows_without_tokens
        turns += turns_of_session
    return turns


@st.composite
def session_batches(draw: st.DrawFn) -> tuple[list[str], np.ndarray, torch.Tensor]:
    """Return keys, padding and mask of sessions with one to four outputs in any order, some of them without tokens."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    keys = []
    for session in range(random.integers(1, 6)):
        prompt = session // 2
        outputs = random.choice(12, size=random.integers(1, 5), replace=False)
        keys += [f"u{prompt}_{session}_{output}" for output in outputs]
    padding_count = random.integers(0, 3)
    keys += [f"pad{number}_0_0" for number in range(padding_count)]
    keys = random.permutation(keys).tolist()
    is_padding = np.array([key.startswith("pad") for key in keys])
    fraction_of_ones = random.choice([0.1, 0.5, 0.9])
    mask = random.random((len(keys), WIDTH)) < fraction_of_ones
    return keys, is_padding, torch.from_numpy(mask).long()


@given(session_batches())
def test_turns_are_the_runs_of_ones_in_the_order_of_outputs(batch):
    keys, is_padding, mask = batch
    rows = RowIndex.of_sessions(keys, is_padding)
    expected = turns_by_loops(keys, mask)

    spans = TurnSpans.of(mask, rows)

    assert spans.trajectory_of_turn.tolist() == [turn.trajectory for turn in expected]
    assert spans.tokens(mask).tolist() == [len(turn.tokens) for turn in expected]
    assert spans.outputs.tolist() == [turn.outputs for turn in expected]
    assert spans.outputs.sum() == len(rows.order)


@given(session_batches())
def test_a_value_per_turn_is_written_over_the_tokens_of_the_turn(batch):
    keys, is_padding, mask = batch
    spans = TurnSpans.of(mask, RowIndex.of_sessions(keys, is_padding))
    expected = torch.zeros(mask.shape, dtype=torch.float64)
    for number, turn in enumerate(turns_by_loops(keys, mask), start=1):
        expected[turn.row, turn.tokens] = number

    number_of_turn = np.arange(1.0, len(spans.span_of_turn) + 1)
    values, lengths = spans.span_values(number_of_turn, mask.numel())
    per_token = write_over_mask(values, mask.double(), lengths)

    assert torch.equal(per_token, expected)


def test_tokens_outside_the_loss_are_not_counted():
    no_padding = np.zeros(2, dtype=bool)
    response_mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])
    loss_mask = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 1]])
    spans = TurnSpans.of(response_mask, RowIndex.of_padding(no_padding))
    assert spans.tokens(loss_mask).tolist() == [1, 0, 2]


def test_a_batch_without_tokens_has_one_turn_per_trajectory():
    no_padding = np.zeros(2, dtype=bool)
    mask = torch.zeros(2, 3)
    spans = TurnSpans.of(mask, RowIndex.of_padding(no_padding))
    assert spans.trajectory_of_turn.tolist() == [0, 1]
    assert spans.tokens(mask).tolist() == [0, 0]
    values, lengths = spans.span_values(np.array([1.0, 2.0]), mask.numel())
    assert not write_over_mask(values, mask.clone(), lengths).any()
