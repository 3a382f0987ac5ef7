from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.facts import facts
from verl_ext.core import rows as rows_module
from verl_ext.core.groups import Groups
from verl_ext.core.rows import Rows, broadcast, empty, float_mask, padding_by_uid, scores, token_counts
from verl_ext.errors import DataError

NAN, INF = math.nan, math.inf


def none(count: int) -> np.ndarray:
    return np.zeros(count, dtype=bool)


def test_padding_rows_are_no_trajectories():
    rows = Rows.of_padding(np.array([False, True, False]))
    assert rows.scored.tolist() == [0, 2]
    assert rows.owner.tolist() == [0, -1, 1]
    assert not rows.plain
    assert rows.take(np.array([5.0, 6.0, 7.0])).tolist() == [5, 7]
    assert rows.labels(["a", "pad", "b"]) == ["a", "b"]
    assert rows.total(np.array([1.0, 9.0, 2.0])).tolist() == [1, 2]
    assert rows.give(np.array([0.5, -0.5])).tolist() == [0.5, 0, -0.5]


def test_without_padding_rows_are_trajectories():
    rows = Rows.of_padding(none(2))
    assert rows.plain
    x = np.array([1.0, 2.0])
    assert rows.take(x) is x
    assert rows.total(x) is x
    assert rows.give(x) is x
    assert rows.labels(["a", "b"]) == ["a", "b"]


def test_the_last_output_of_a_session_speaks_for_the_others():
    keys = ["u_0_1", "u_0_0", "u_1_0", "u_0_2", "x_y_0_0"]
    rows = Rows.of_sessions(keys, none(5))
    assert rows.scored.tolist() == [3, 2, 4]
    assert rows.owner.tolist() == [0, 0, 1, 0, 2]
    assert rows.total(np.array([1.0, 2.0, 4.0, 8.0, 16.0])).tolist() == [11, 4, 16]
    assert rows.give(np.array([0.5, -0.5, 0.25])).tolist() == [0.5, 0.5, -0.5, 0.5, 0.25]


def test_outputs_are_ordered_by_number_not_by_spelling():
    rows = Rows.of_sessions(["u_0_10", "u_0_9"], none(2))
    assert rows.scored.tolist() == [0]


def test_outputs_are_ordered_by_number_not_by_row():
    rows = Rows.of_sessions(["v_0_0", "v_1_0", "v_2_0", "u_0_2", "u_0_1"], none(5))
    assert rows.scored.tolist() == [0, 1, 2, 3]


def test_padding_is_left_out_of_sessions():
    rows = Rows.of_sessions(["pad_0_3", "u_0_0", "u_0_1", "pad_0_4"], np.array([True, False, False, True]))
    assert rows.scored.tolist() == [2]
    assert rows.owner.tolist() == [-1, 0, 0, -1]
    assert rows.give(np.array([2.0])).tolist() == [0, 2, 2, 0]


def test_one_output_a_session_needs_no_bookkeeping():
    assert Rows.of_sessions(["u_0_0", "u_1_0"], none(2)).plain
    assert Rows.of_sessions([], none(0)).scored.shape == (0,)


def test_a_session_whose_output_has_no_number_is_named():
    with pytest.raises(DataError, match="'u_0_x'"):
        Rows.of_sessions(["u_0_0", "u_0_x"], none(2))


MASKS = [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", MASKS)
def test_lengths_are_counted_in_the_mask(kind, dtype):
    mask = float_mask(torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1]]).to(kind), dtype)
    assert token_counts(mask).tolist() == [2, 0, 2]
    assert token_counts(mask).dtype == np.float64
    assert token_counts(mask.t()).tolist() == [2, 1, 1]
    assert token_counts(mask[:, :0]).tolist() == [0, 0, 0]
    assert token_counts(mask[:0]).tolist() == []


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("tokens", [254, 255, 256, 510, 511, 70_000])
def test_long_responses_are_counted_whole(kind, tokens):
    """Also those that are longer than the largest number of their type, or than the numbers that it has one by one."""
    mask = torch.ones(2, tokens + 300).to(kind)
    mask[:, tokens:] = 0
    mask[1, 0] = 0
    assert token_counts(float_mask(mask, torch.float32)).tolist() == [tokens, tokens - 1]


def test_a_score_may_stand_behind_the_mask():
    """The score of a multi-turn response stands on its last token, which may be a tool's."""
    assert scores(torch.tensor([[0.5, 0.0, 2.0]]), torch.tensor([[1, 1, 0]])).tolist() == [2.5]


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_what_is_not_finite_behind_the_mask_is_no_score(junk):
    rewards = torch.tensor([[0.5, 0.25, junk], [1.0, 2.0, 4.0], [junk, junk, junk]])
    before = rewards.clone()
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 0]])
    assert scores(rewards, mask).tolist() == [0.75, 7, 0]
    torch.testing.assert_close(rewards, before, equal_nan=True)


def test_what_is_not_finite_within_the_mask_is_seen():
    rewards = torch.tensor([[NAN, 1.0], [INF, 1.0], [1.0, 1.0]])
    np.testing.assert_array_equal(scores(rewards, torch.ones(3, 2)), [NAN, INF, 2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_floats_are_summed_in_float32(dtype):
    """4096 + 1 is 4096 in float16 (steps of 4) and in bfloat16 (steps of 32)."""
    assert scores(torch.tensor([[4096.0, 1.0]], dtype=dtype), torch.ones(1, 2)).tolist() == [4097]


def test_double_precision_is_kept():
    assert scores(torch.tensor([[1.0, 1e-12]], dtype=torch.float64), torch.ones(1, 2)).tolist() == [1 + 1e-12]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", MASKS)
def test_an_advantage_is_broadcast_over_the_tokens_that_count(kind, dtype, large, monkeypatch):
    """Bit for bit the advantage where a token counts, and 0 elsewhere: not -0 for a negative one."""
    monkeypatch.setattr(rows_module, "HUGE", 0 if large else 2**60)
    draw = np.random.default_rng(0)
    per_row = np.append(draw.normal(size=61), [0.0, 6e4, -6e4])
    mask = torch.from_numpy(draw.random((64, 37)) < 0.5)
    mask[0], mask[1] = True, False
    found = broadcast(per_row, float_mask(mask.to(kind), dtype))
    assert found.dtype == dtype
    column = torch.from_numpy(per_row).to(dtype)
    assert torch.equal(found, torch.where(mask, column[:, None], torch.zeros((), dtype=dtype)))
    assert not torch.signbit(found[~mask]).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mask_of_weights_scales_the_advantage(dtype):
    mask = torch.tensor([[1.0, 0.25, 0.0], [0.5, 0.0, 1.0]])
    found = broadcast(np.array([-0.5, 3.0]), float_mask(mask, dtype))
    assert found.tolist() == [[-0.5, -0.125, 0], [1.5, 0, 3]]
    assert not torch.signbit(found[:, 2]).any()


def test_advantages_of_whole_numbers_are_float32():
    assert float_mask(torch.ones(1, 1, dtype=torch.int64), torch.int64).dtype == torch.float32


def test_an_advantage_too_large_for_its_type_is_an_error():
    assert broadcast(np.array([6e4]), torch.ones(1, 2).half()).tolist() == [[6e4, 6e4]]
    with pytest.raises(DataError, match=facts(-70000, "torch.float16", "algorithm.rewards.weights")):
        broadcast(np.array([6e4, -7e4]), torch.ones(2, 2).half())


def test_padding_is_told_by_its_name_and_that_no_token_counts():
    mask = torch.tensor([[0, 0], [1, 0], [0, 0], [0, 0]])
    for uids, padding in (
        (["pad-1", "pad-2", 7, "a"], [True, False, False, False]),
        (["p", 7, "pad", "a"], [False, False, True, False]),
        (["p", "xpad", "a", "pad"], [False, False, False, True]),
    ):
        assert padding_by_uid(uids, Groups.of(uids), mask).tolist() == padding


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.bfloat16, 301), (torch.float16, 2049)])
def test_tokens_of_a_short_float_mask_are_counted_one_by_one(dtype, tokens):
    """Beyond 256 and 2048 these types have even numbers only."""
    assert token_counts(torch.ones(1, tokens, dtype=dtype)).tolist() == [tokens]


@pytest.mark.parametrize(
    ("seen", "score"),
    [
        ([INF, -INF, 0.0], INF),  # their sum would be NaN, which means "not scored"
        ([NAN, -INF, 0.0], INF),
        ([INF, 1.0, 0.0], INF),
        ([-INF, 1.0, 0.0], -INF),
        ([NAN, 1.0, 0.0], NAN),
    ],
)
def test_an_infinite_score_does_not_hide_behind_another(seen, score):
    found = scores(torch.tensor([seen, [1.0, 2.0, 3.0]]), torch.ones(2, 3))
    np.testing.assert_array_equal(found, [score, 6.0])


def test_the_largest_float_is_an_advantage():
    largest = float(torch.finfo(torch.float32).max)
    for value in (largest, -largest):
        assert broadcast(np.array([value]), torch.ones(1, 1)).tolist() == [[value]]
    with pytest.raises(DataError, match=facts(f"{-largest * 1.001:g}", "torch.float32")):
        broadcast(np.array([-largest * 1.001]), torch.ones(1, 1))


@pytest.mark.parametrize(("tokens", "large"), [(rows_module.HUGE // 2 - 1, False), (rows_module.HUGE // 2, True)])
def test_a_large_result_is_written_into_memory_of_numpys(tokens, large, monkeypatch):
    taken = []
    monkeypatch.setattr(rows_module, "empty", lambda shape, kind: taken.append(shape) or torch.empty(shape, dtype=kind))
    mask = torch.ones(2, tokens)
    mask[1, 1:] = 0
    found = broadcast(np.array([0.5, -2.0]), float_mask(mask, torch.float32))
    assert taken == [mask.shape] * large
    assert (found[0] == 0.5).all()
    assert found[1, 0] == -2.0
    assert found[1].abs().sum() == 2.0


def test_a_mask_stays_on_its_device(monkeypatch):
    """The device `meta` stands for every device but the processor."""
    monkeypatch.setattr(rows_module, "HUGE", 0)
    assert float_mask(torch.ones(2, 3, device="meta"), torch.float32).device.type == "meta"


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_of_numpys_has_the_shape_and_type_that_was_asked_for(shape, dtype):
    found = empty(torch.Size(shape), dtype)
    assert found.shape == shape
    assert found.dtype == dtype
    assert found.fill_(1.0).sum() == math.prod(shape)
