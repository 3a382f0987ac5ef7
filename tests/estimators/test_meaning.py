"""What a setting means where float32 is in the way."""

from __future__ import annotations

import numpy as np
import pytest

from verl_ext import Batch, Settings, build
from verl_ext.core.batch import unit_accuracy

THRESHOLDS = [0.1, 0.3, 0.7, 1.0, -0.7, 0.0, 12.7, -1234.7]


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_a_float32_reward_at_the_threshold_of_a_condition_has_reached_it(threshold):
    """float32(0.7) is 0.69999999."""
    hard = float(np.float32(threshold))
    config = {"rewards": {"keys": ["easy", "hard"], "weights": [1.0, 0.0]}}
    config |= {"gdpo": {"whiten": "none", "scale": "none"}}
    config["gdpo"]["conditions"] = {"easy": {"on": "hard", "at_least": threshold}}
    batch = Batch.of([[2, hard], [0, hard], [2, hard - 0.01], [2, hard + 0.01]], ["g"] * 4, keys=("easy", "hard"))
    result = build("gdpo", Settings.parse(config))(batch)
    assert result.advantages.tolist() == [1, -1, -1, 1]  # easy counts 2, 0, 0, 2
    assert result.metrics["condition_met/easy"] == 0.75


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_a_float32_score_at_the_threshold_of_the_accuracy_is_not_above_it(threshold):
    """float32(0.1) is 0.10000000149."""
    values = np.float64(np.float32([threshold, threshold - 0.01, threshold + 0.01]))
    assert unit_accuracy(values, list("abc"), key="k", threshold=threshold).tolist() == [0, 0, 1]
