"""The steps that weigh whole groups, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.core.columns import column
from verl_ext.core.totals import Balance, WeighByDifficulty

NAN = math.nan


@pytest.mark.parametrize(
    ("values", "factor", "dead"), [([1.0, -1.0, 0.0, 0.0, 0.0], 2.5, 0.6), ([0.0, 0.0], 1.0, 1.0), ([], 1.0, 0.0)]
)
def test_balance_logs_the_factor_and_the_share_of_dead_rows(values, factor, dead):
    found = Balance("token").update(*column(values, list("aabbb")[: len(values)]), None).metrics
    assert found == pytest.approx({"balance_z": factor, "dead_share": dead})


def test_difficulty_weighs_hard_groups_more():
    accuracy = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    step = WeighByDifficulty(0.5)
    values, batch = column([1.0, -1.0, 2.0, -2.0, 3.0, 3.0], list("aabbcc"), accuracy=accuracy)
    update = step.update(values, batch, None)
    # acc a = 0.5, b = 0, which counts as 1: odds e^-1, e^-2; 2 / (1 + e^-1) = 1.462117 and 0.537883; c: 1.
    np.testing.assert_allclose(update.values[:, 0], [1.462117, -1.462117, 1.075766, -1.075766, 3, 3], atol=1e-6)
    assert update.metrics == pytest.approx(
        {
            "valid_groups": 2,
            "all_right_groups": 1,
            "all_wrong_groups": 1,
            "difficulty_weight_max": 1.462117,
            "difficulty_weight_min": 0.537883,
        },
        abs=1e-6,
    )


@pytest.mark.filterwarnings("error")
def test_difficulty_at_a_low_temperature_leaves_the_hardest_alone():
    """exp(-0.25 / 1e-4) alone would be 0 already."""
    values, batch = column([1.0, -1.0, 1.0, -1.0], list("aabb"), accuracy=[0.5, 0.0, 1.0, 0.5])
    assert WeighByDifficulty(1e-4).update(values, batch, None).values[:, 0].tolist() == [2, -2, 0, 0]
