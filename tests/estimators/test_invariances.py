"""Groups that are exactly zero, and extreme rewards.

Types and masks are the subject of tests/core/test_row_index.py; padding, holes in the mask and sessions of several
outputs that of tests/integration/trainers/test_against_core.py.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import Rollout
from tests.estimators.every import ESTIMATORS, KEYS, SHIFTS, run, state_of_hadw
from verl_ext import Batch, Settings, build
from verl_ext.errors import VerlExtError


@pytest.mark.parametrize(("name", "config"), [given for kind, given in ESTIMATORS.items() if kind not in SHIFTS])
@pytest.mark.parametrize("constant", [0.2, -0.7, 1e5 + 0.1])
def test_a_group_of_one_and_a_zero_variance_group_are_exactly_0(name, config, constant):
    """A float32 constant of 0.2 has a standard deviation of 1.6e-8; here with noise of one unit in the last place."""
    value = np.float32(constant)
    dead = [float(value), float(np.nextafter(value, np.float32(9e9))), float(value), float(value)]
    rollout = Rollout(
        list("ddddxxxxo"),
        {"a": [*dead, 1, 0, 0, 0, 9], "b": [*dead, 0, 0, 1, 1, 3]},
        [*[3, 1, 2, 5] * 2, 1],
        [*[0.5] * 4, 1, 0, 0, 0, 1],
    )
    found = run(name, config, rollout).rows
    assert found[[0, 1, 2, 3, 8]].tolist() == [0] * 5
    assert (found[4:8] != 0).any()


EXTREMES = (0.0, -0.0, 1.0, -1.0, 5e-324, 1e-30, 1e-7, 1e16, 1e30, -1e30, 1e31, math.nan, math.inf)
SETTINGS = [
    *ESTIMATORS.values(),
    ("gdpo", KEYS | {"gdpo": {"whiten": "none", "scale": "mad", "epsilon": 5e-324}}),
    ("dgpo", KEYS | {"dgpo": {"dqw_temp": 1e308}}),
    ("hadw", KEYS | {"hadw": {"anchor": "fixed", "fixed_anchor": 0.0, "lambda_scale": 1e30, "base": "dgpo"}}),
    ("maxrl", {"rewards": {"keys": ["a", "b"]}}),
]


@pytest.mark.parametrize(("name", "config"), SETTINGS)
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.filterwarnings("error")  # an overflow that numpy warns of would be a wrong number
def test_extreme_rewards_give_finite_numbers_or_an_error_of_the_package(name, config, seed):
    draw = np.random.default_rng(seed)
    size, few = draw.integers(0, 9), draw.choice(EXTREMES, 2)
    try:
        batch = Batch.of(
            draw.choice(draw.choice([EXTREMES, EXTREMES[:9], (*few, 1.0)][draw.integers(3)], 3), (size, 2)),
            draw.integers(0, 3, size).tolist(),
            keys=("a", "b"),
            lengths=draw.integers(0, 9, size),
            accuracy=draw.random(size),
        )
        result = build(name, Settings.parse(config))(batch, state_of_hadw(config) if name == "hadw" else None)
    except VerlExtError:
        return
    assert np.isfinite([*result.advantages, *result.metrics.values()]).all()
