import math

import numpy as np
import pytest
import torch

from tests.facts import facts
from verl_ext.core.groups import Groups
from verl_ext.core.row_index import RowIndex, float_mask, scores, write_over_mask
from verl_ext.errors import DataError

NAN, INF = math.nan, math.inf


def none(count: int) -> np.ndarray:
    return np.zeros(count, dtype=bool)


@pytest.mark.parametrize(
    ("keys", "padding", "scored", "trajectory_of_row"),
    [
        (["u_0_10", "u_0_9"], [], [0], [0, 0]),  # by number, not by spelling
        (["u_0_0", "u_0_1", "u_1_0"], [], [1, 2], [0, 0, 1]),
        (["v_0_0", "v_1_0", "v_2_0", "u_0_2", "u_0_1"], [], [0, 1, 2, 3], [0, 1, 2, 3, 3]),  # nor by row
        (["pad_0_3", "u_0_0", "u_0_1", "pad_0_4"], [0, 3], [2], [-1, 0, 0, -1]),
    ],
)
def test_the_last_output_has_the_largest_number_and_padding_is_left_out(keys, padding, scored, trajectory_of_row):
    rows = RowIndex.of_sessions(keys, np.isin(np.arange(len(keys)), padding))
    assert rows.scored.tolist() == scored
    assert rows.trajectory_of_row.tolist() == trajectory_of_row


def test_the_rows_of_a_trajectory_are_in_the_order_of_generation():
    rows = RowIndex.of_sessions(["v_0_1", "u_0_10", "pad_0_1", "u_0_9", "v_0_0"], np.arange(5) == 2)
    assert rows.by_trajectory() == [[4, 0], [3, 1]]
    assert rows.order.tolist() == [4, 0, 3, 1]
    assert rows.outputs.tolist() == [2, 2]


def test_a_session_whose_output_has_no_number_is_named():
    with pytest.raises(DataError, match="'u_0_x'"):
        RowIndex.of_sessions(["u_0_0", "u_0_x"], none(2))


FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
MASKS = [torch.int64, torch.int32, torch.uint8, torch.bool, *FLOATS]


@pytest.mark.parametrize("junk", [NAN, INF, -INF])
def test_what_is_not_finite_behind_the_mask_is_no_score(junk):
    rewards = torch.tensor([[0.5, 0.25, junk], [1.0, 2.0, 4.0], [junk, junk, junk]])
    before = rewards.clone()
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 0]])
    assert scores(rewards, mask).tolist() == [0.75, 7, 0]
    torch.testing.assert_close(rewards, before, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.float16, [4096.0, 1.0]),  # steps of 4 there, and of 32 in bfloat16: both are summed in float32
        (torch.bfloat16, [4096.0, 1.0]),
        (torch.float64, [1.0, 1e-12]),
    ],
)
def test_scores_are_summed_exactly_enough(dtype, values):
    assert scores(torch.tensor([values], dtype=dtype), torch.ones(1, 2)).tolist() == [sum(values)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", MASKS)
def test_an_advantage_is_broadcast_over_the_tokens_that_count(kind, dtype):
    """Bit for bit the advantage where a token counts, and 0 elsewhere: not -0 for a negative one."""
    draw = np.random.default_rng(0)
    per_row = np.append(draw.normal(size=61), [0.0, 6e4, -6e4])
    mask = torch.from_numpy(draw.random((64, 37)) < 0.5)
    mask[0], mask[1] = True, False
    found = write_over_mask(per_row, float_mask(mask.to(kind), dtype))
    assert found.dtype == dtype
    column = torch.from_numpy(per_row).to(dtype)
    assert torch.equal(found, torch.where(mask, column[:, None], torch.zeros((), dtype=dtype)))
    assert not torch.signbit(found[~mask]).any()


def test_padding_is_recognized_by_its_name_and_that_no_row_sums():
    mask = torch.tensor([[0, 0], [1, 0], [0, 0], [0, 0]])
    for uids, padding in (
        (["pad-1", "pad-2", 7, "a"], [True, False, False, False]),
        (["p", 7, "pad", "a"], [False, False, True, False]),
        (["p", "xpad", "a", "pad"], [False, False, False, True]),
    ):
        rows = RowIndex.of_groups(Groups.of(uids), mask)
        assert (rows.trajectory_of_row < 0).tolist() == padding
        assert rows.scored.tolist() == [row for row, padded in enumerate(padding) if not padded]
        assert not rows.one_to_one


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_advantage_may_be_as_large_as_its_type_allows(dtype):
    largest, mask = float(torch.finfo(dtype).max), torch.ones(2, 1, dtype=dtype)
    for value in (largest, -largest):
        assert write_over_mask(np.array([value, 1.0]), mask.clone()).tolist() == [[value], [1.0]]
    with pytest.raises(DataError, match=facts(f"{-largest * 1.001:g}", dtype, "algorithm.rewards.weights")):
        write_over_mask(np.array([1.0, -largest * 1.001]), mask)


def test_a_mask_is_copied_on_its_device():
    """The device `meta` stands for every device but the processor."""
    assert float_mask(torch.ones(2, 3, device="meta", dtype=torch.int64), torch.float32).device.type == "meta"
    mask = torch.ones(2, 3)
    assert float_mask(mask, torch.float32).data_ptr() != mask.data_ptr()


def test_padding_gets_0():
    rows = RowIndex.of_padding(np.array([False, True, False]))
    assert rows.scatter(np.array([0.5, -0.5])).tolist() == [0.5, 0, -0.5]
