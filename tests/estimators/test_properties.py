"""Advantages that are exactly 0, whatever the estimator, and a reward that is the score."""

from __future__ import annotations

import numpy as np
import pytest

from tests.batches import Rollout
from tests.estimators.every import EVERY, KEEPS_DEAD, run


@EVERY
def test_a_group_of_one_has_no_advantage(name, config):
    config = config | {"gdpo": {}, "gd2po": {"whiten": "none"}}  # over tokens 0 is shifted, as in verl
    rollout = Rollout(list("abbc"), {"a": [1.0, 1, 0, 0], "b": [3.0, 1, 0, 9]}, [2] * 4, [1.0, 1, 0, 0])
    found = run(name, config, rollout).rows
    assert found[[0, 3]].tolist() == [0, 0]
    assert (found[[1, 2]] != 0).all()


@KEEPS_DEAD
@pytest.mark.parametrize("constant", [0.1, 0.2, 0.3, 1 / 3, -0.7, 1e5 + 0.1, 0.0])
def test_a_group_without_variance_is_exactly_zero(name, config, constant):
    """A float32 constant of 0.2 has a standard deviation of 1.6e-8; here with noise of one unit in the last place."""
    value = np.float32(constant)
    dead = [float(value), float(np.nextafter(value, np.float32(9e9))), float(value), float(value)]
    rollout = Rollout(
        list("ddddxxxx"),
        {"a": [*dead, 1, 0, 0, 0], "b": [*dead, 0, 0, 1, 1]},
        [3, 1, 2, 5] * 2,
        [0.5] * 4 + [1, 0, 0, 0],
    )
    found = run(name, config, rollout).rows
    assert found[:4].tolist() == [0, 0, 0, 0]
    assert (found[4:] != 0).any()
