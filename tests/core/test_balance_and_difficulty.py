"""The steps that weigh whole groups, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given

from tests.batches import rollouts
from tests.core.columns import apply, column
from verl_ext.core.batch import Batch
from verl_ext.core.steps import (
    Balance,
    WeighByDifficulty,
)

NAN = math.nan


def test_balance_undoes_the_share_of_groups_without_variance():
    values = [1.0, -1.0, 0.0, 0.0, 0.0]
    uids = ["a", "a", "b", "b", "b"]
    # 10 tokens, 4 of them in "a"; 5 sequences, 2 of them in "a".
    assert apply(Balance("token"), values, uids, lengths=[1, 3, 2, 2, 2]).tolist() == [2.5, -2.5, 0, 0, 0]
    assert apply(Balance("sequence"), values, uids, lengths=[1, 1, 2, 2, 2]).tolist() == [2.5, -2.5, 0, 0, 0]
    assert apply(Balance("token"), values, uids, lengths=[1, 1, 2, 2, 2]).tolist() == [4, -4, 0, 0, 0]


def test_balance_is_one_where_no_group_is_valid():
    step, (values, batch) = Balance("token"), column([0.0, 0.0])
    wanted = {"balance_z": 1.0, "zero_mask_ratio": 1.0, "dead_share": 1.0}
    assert step.update(values, batch, None).metrics == wanted


def test_an_empty_batch_has_nothing_to_balance():
    batch = Batch.of([], [])
    wanted = {"balance_z": 1.0, "zero_mask_ratio": 1.0, "dead_share": 0.0}
    assert Balance().update(batch.rewards, batch, None).metrics == wanted


def test_balance_logs_the_factor_and_the_share_of_dead_rows():
    step, (values, batch) = Balance("token"), column([1.0, -1.0, 0.0, 0.0, 0.0], list("aabbb"))
    assert step.update(values, batch, None).metrics == pytest.approx(
        {"balance_z": 2.5, "zero_mask_ratio": 2.5, "dead_share": 0.6}  # the authors call z zero_mask_ratio
    )


def test_difficulty_weighs_hard_groups_more():
    accuracy = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    step = WeighByDifficulty(0.5)
    values, batch = column([1.0, -1.0, 2.0, -2.0, 0.0, 0.0], list("aabbcc"), accuracy=accuracy)
    update = step.update(values, batch, None)
    # acc a = 0.5, b = 0, which counts as 1: odds e^-1, e^-2; 2 / (1 + e^-1) = 1.462117 and 0.537883; c has 1.
    np.testing.assert_allclose(update.values[:, 0], [1.462117, -1.462117, 1.075766, -1.075766, 0, 0], atol=1e-6)
    assert update.metrics == pytest.approx(
        {
            "valid_groups": 2,
            "all_right_groups": 1,
            "all_wrong_groups": 1,
            "difficulty_weight_mean": 1,
            "difficulty_weight_max": 1.462117,
            "difficulty_weight_min": 0.537883,
        },
        abs=1e-6,
    )


def test_difficulty_leaves_groups_without_variance_alone():
    values, batch = column([1.0, -1.0, 3.0], list("aab"), accuracy=[1.0, 0.0, 1.0])
    assert WeighByDifficulty().update(values, batch, None).values[:, 0].tolist() == [1, -1, 3]


@pytest.mark.filterwarnings("error")
def test_difficulty_at_a_low_temperature_leaves_the_hardest_alone():
    """exp(-0.25 / 1e-4) alone would be 0 already."""
    values, batch = column([1.0, -1.0, 1.0, -1.0], list("aabb"), accuracy=[0.5, 0.0, 1.0, 0.5])
    assert WeighByDifficulty(1e-4).update(values, batch, None).values[:, 0].tolist() == [2, -2, 0, 0]


def test_a_group_whose_accuracy_is_not_scored_counts_as_easy():
    values, batch = column([1.0, -1.0, 1.0, -1.0], list("aabb"), accuracy=[NAN, NAN, 1.0, 1.0])
    np.testing.assert_allclose(WeighByDifficulty().update(values, batch, None).values, values)  # both 1, weight 1


@given(rollouts())
def test_difficulty_weights_add_up_to_the_number_of_valid_groups(rollout):
    batch = Batch.of(rollout.rewards, rollout.uids, keys=("a", "b"), accuracy=rollout.accuracy)
    metrics = WeighByDifficulty(0.7).update(batch.rewards[:, :1], batch, None).metrics
    if metrics["valid_groups"]:
        assert metrics["difficulty_weight_mean"] == pytest.approx(1)
