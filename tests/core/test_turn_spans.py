"""The turns in a response mask, against plain loops over the tokens of each session."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.core.row_index import RowIndex, write_over_mask
from verl_ext.core.turn_spans import TurnSpans

WIDTH = 9


def runs_of_ones(mask_row: list[int]) -> list[list[int]]:
    """The tokens of each run of ones in a row of the mask."""
    runs: list[list[int]] = []
    for token, inside in enumerate(mask_row):
        if inside:
            continues = token > 0 and mask_row[token - 1]
            if not continues:
                runs.append([])
            runs[-1].append(token)
    return runs


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[str], np.ndarray, torch.Tensor]:
    """Names, padding and mask of sessions with one to four outputs in any order, some of them without tokens."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    keys = []
    for session in range(rng.integers(1, 6)):
        outputs = rng.choice(12, size=rng.integers(1, 5), replace=False)
        keys += [f"u{session // 2}_{session}_{output}" for output in outputs]
    keys += [f"pad{number}_0_0" for number in range(rng.integers(0, 3))]
    keys = rng.permutation(keys).tolist()
    padding = np.array([key.startswith("pad") for key in keys])
    fraction = rng.choice([0.1, 0.5, 0.9])
    return keys, padding, torch.from_numpy(rng.random((len(keys), WIDTH)) < fraction).long()


@given(batches())
def test_turns_are_the_runs_of_ones_and_outputs_of_a_session_follow_one_another(batch):
    keys, padding, mask = batch
    rows = RowIndex.of_sessions(keys, padding)
    spans = TurnSpans.of(mask, rows)
    per_turn = np.arange(1.0, len(spans.span_of_turn) + 1)
    values, lengths = spans.span_values(per_turn, mask.numel())
    per_token = write_over_mask(values, mask.double(), lengths)

    sessions = list(dict.fromkeys(key.rpartition("_")[0] for key in keys if not key.startswith("pad")))
    trajectory_of_turn, tokens, outputs = [], [], []
    expected_per_token = torch.zeros(mask.shape, dtype=torch.float64)
    for trajectory, session in enumerate(sessions):
        numbers = sorted(int(key.rpartition("_")[2]) for key in keys if key.rpartition("_")[0] == session)
        first_turn = len(tokens)
        rows_without_tokens = 0
        for number in numbers:
            row = keys.index(f"{session}_{number}")
            runs = runs_of_ones(mask[row].tolist())
            rows_without_tokens += not runs
            for index, run in enumerate(runs):
                trajectory_of_turn.append(trajectory)
                tokens.append(len(run))
                outputs.append(int(index == 0))
                expected_per_token[row, run] = len(tokens)
        if len(tokens) == first_turn:
            trajectory_of_turn.append(trajectory)
            tokens.append(0)
            outputs.append(0)
        outputs[first_turn] += rows_without_tokens

    assert spans.trajectory_of_turn.tolist() == trajectory_of_turn
    assert spans.tokens(mask).tolist() == tokens
    assert spans.outputs.tolist() == outputs
    assert spans.outputs.sum() == len(rows.order)
    assert torch.equal(per_token[~padding], expected_per_token[~padding])
    assert not per_token[padding].any()


def test_tokens_that_left_the_loss_are_not_counted():
    spans = TurnSpans.of(torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]]), RowIndex.of_padding(np.zeros(2, dtype=bool)))
    assert spans.tokens(torch.tensor([[1, 0, 0, 0], [0, 1, 0, 1]])).tolist() == [1, 0, 2]


def test_a_batch_without_tokens_has_one_turn_per_trajectory():
    mask = torch.zeros(2, 3)
    spans = TurnSpans.of(mask, RowIndex.of_padding(np.zeros(2, dtype=bool)))
    assert spans.trajectory_of_turn.tolist() == [0, 1]
    assert spans.tokens(mask).tolist() == [0, 0]
    values, lengths = spans.span_values(np.array([1.0, 2.0]), mask.numel())
    assert not write_over_mask(values, mask.clone(), lengths).any()
