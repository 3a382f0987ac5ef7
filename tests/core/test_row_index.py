"""The rows of verl's batch: outputs of a session, padding, scores behind a mask, and advantages written over a mask."""

import math

import numpy as np
import pytest
import torch

from tests.facts import facts
from verl_ext.core.groups import Groups
from verl_ext.core.row_index import RowIndex, float_mask, scores, write_over_mask
from verl_ext.errors import DataError

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("keys", "padding", "scored", "trajectory_of_row"),
    [
        pytest.param(["u_0_10", "u_0_9"], [], [0], [0, 0], id="ordered by number, not by spelling"),
        pytest.param(["u_0_0", "u_0_1", "u_1_0"], [], [1, 2], [0, 0, 1], id="two sessions"),
        pytest.param(
            ["v_0_0", "v_1_0", "v_2_0", "u_0_2", "u_0_1"], [], [0, 1, 2, 3], [0, 1, 2, 3, 3], id="not ordered by row"
        ),
        pytest.param(["pad_0_3", "u_0_0", "u_0_1", "pad_0_4"], [0, 3], [2], [-1, 0, 0, -1], id="padding"),
    ],
)
def test_the_last_output_has_the_largest_number_and_padding_is_left_out(keys, padding, scored, trajectory_of_row):
    is_padding = np.isin(np.arange(len(keys)), padding)
    rows = RowIndex.of_sessions(keys, is_padding)
    assert rows.scored.tolist() == scored
    assert rows.trajectory_of_row.tolist() == trajectory_of_row


def test_the_rows_of_a_trajectory_are_in_the_order_of_generation():
    keys = ["v_0_1", "u_0_10", "pad_0_1", "u_0_9", "v_0_0"]
    is_padding = np.array([False, False, True, False, False])
    rows = RowIndex.of_sessions(keys, is_padding)
    assert rows.by_trajectory() == [[4, 0], [3, 1]]
    assert rows.order.tolist() == [4, 0, 3, 1]
    assert rows.outputs.tolist() == [2, 2]


def test_a_session_whose_output_has_no_number_is_rejected_by_name():
    no_padding = np.zeros(2, dtype=bool)
    with pytest.raises(DataError, match="'u_0_x'"):
        RowIndex.of_sessions(["u_0_0", "u_0_x"], no_padding)


FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
MASKS = [torch.int64, torch.int32, torch.uint8, torch.bool, *FLOATS]


@pytest.mark.parametrize("outside", [NAN, INF, -INF])
def test_a_reward_outside_the_mask_is_ignored(outside):
    rewards = torch.tensor([[0.5, 0.25, outside], [1.0, 2.0, 4.0], [outside, outside, outside]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 0]])
    before = rewards.clone()

    assert scores(rewards, mask).tolist() == [0.5 + 0.25, 1 + 2 + 4, 0]
    torch.testing.assert_close(rewards, before, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.float16, [4096.0, 1.0]),  # the next float16 is 4100, and the next bfloat16 is 4128
        (torch.bfloat16, [4096.0, 1.0]),
        (torch.float64, [1.0, 1e-12]),
    ],
)
def test_scores_are_summed_with_more_digits_than_their_type_has(dtype, values):
    rewards = torch.tensor([values], dtype=dtype)
    assert scores(rewards, torch.ones(1, 2)).tolist() == [sum(values)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mask_dtype", MASKS)
def test_an_advantage_is_written_over_the_tokens_of_the_mask(mask_dtype, dtype):
    """The advantage is bitwise identical inside the mask. Outside it is 0, and not -0 for a negative advantage."""
    random = np.random.default_rng(0)
    per_row = np.append(random.normal(size=61), [0.0, 6e4, -6e4])
    mask = torch.from_numpy(random.random((64, 37)) < 0.5)
    mask[0] = True
    mask[1] = False

    per_token = write_over_mask(per_row, float_mask(mask.to(mask_dtype), dtype))

    advantages = torch.from_numpy(per_row).to(dtype)[:, None]
    zero = torch.zeros((), dtype=dtype)
    assert per_token.dtype == dtype
    assert torch.equal(per_token, torch.where(mask, advantages, zero))
    assert not torch.signbit(per_token[~mask]).any()


@pytest.mark.parametrize(
    ("uids", "is_padding"),
    [
        (["pad-1", "pad-2", 7, "a"], [True, False, False, False]),  # the second row has a token in the mask
        (["p", 7, "pad", "a"], [False, False, True, False]),
        (["p", "xpad", "a", "pad"], [False, False, False, True]),
    ],
    ids=str,
)
def test_padding_is_recognized_by_its_name_and_an_empty_mask(uids, is_padding):
    mask = torch.tensor([[0, 0], [1, 0], [0, 0], [0, 0]])
    rows = RowIndex.of_groups(Groups.of(uids), mask)
    assert (rows.trajectory_of_row < 0).tolist() == is_padding
    assert rows.scored.tolist() == [row for row in range(4) if not is_padding[row]]
    assert not rows.one_to_one


@pytest.mark.parametrize(
    ("token_rewards", "score"),
    [
        ([INF, -INF, 0.0], INF),  # their sum would be NaN, which means "not scored"
        ([NAN, -INF, 0.0], INF),
        ([INF, 1.0, 0.0], INF),
        ([-INF, 1.0, 0.0], -INF),
        ([NAN, 1.0, 0.0], NAN),
    ],
    ids=str,
)
def test_an_infinite_reward_of_a_token_makes_the_score_infinite(token_rewards, score):
    rewards = torch.tensor([token_rewards, [1.0, 2.0, 3.0]])
    np.testing.assert_array_equal(scores(rewards, torch.ones(2, 3)), [score, 6.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sign", [1, -1])
def test_an_advantage_may_be_as_large_as_its_type_allows(dtype, sign):
    largest = sign * float(torch.finfo(dtype).max)
    mask = torch.ones(2, 1, dtype=dtype)
    per_token = write_over_mask(np.array([largest, 1.0]), mask)
    assert per_token.tolist() == [[largest], [1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_advantage_that_its_type_cannot_hold_is_rejected(dtype):
    too_low = -1.001 * float(torch.finfo(dtype).max)
    mask = torch.ones(2, 1, dtype=dtype)
    with pytest.raises(DataError, match=facts(f"{too_low:g}", dtype, "algorithm.rewards.weights")):
        write_over_mask(np.array([1.0, too_low]), mask)


def test_a_float_mask_is_a_copy():
    mask = torch.ones(2, 3)
    assert float_mask(mask, torch.float32).data_ptr() != mask.data_ptr()


def test_a_float_mask_is_on_the_device_of_the_mask():
    """The device `meta` stands for every device other than the CPU."""
    mask = torch.ones(2, 3, device="meta", dtype=torch.int64)
    assert float_mask(mask, torch.float32).device.type == "meta"


def test_padding_gets_the_advantage_0():
    rows = RowIndex.of_padding(np.array([False, True, False]))
    assert rows.scatter(np.array([0.5, -0.5])).tolist() == [0.5, 0, -0.5]
