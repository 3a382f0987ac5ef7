"""Zero-variance groups, groups of one response, and extreme rewards.

tests/core/test_row_index.py tests data types and masks. tests/integration/trainers/test_trainers_equal_core.py tests
padding, gaps in the mask and sessions of several outputs.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import Rollout
from tests.estimators.estimator_variants import KEYS, SHIFTING_VARIANTS, VARIANTS, call_on_rollout, state_of_hadw
from verl_ext import Batch, Settings, build
from verl_ext.errors import VerlExtError

KEEPING_VARIANTS = {name: variant for name, variant in VARIANTS.items() if name not in SHIFTING_VARIANTS}


@pytest.mark.parametrize(("name", "config"), KEEPING_VARIANTS.values(), ids=KEEPING_VARIANTS.keys())
@pytest.mark.parametrize("constant", [0.2, -0.7, 1e5 + 0.1])
def test_a_zero_variance_group_and_a_group_of_one_get_exactly_0(name, config, constant):
    """One of the rewards is the next float32, as if it had been rounded differently.

    The standard deviation of float32 constants of 0.2 is 1.6e-8 instead of 0.
    """
    value = float(np.float32(constant))
    next_value = float(np.nextafter(np.float32(constant), np.float32(9e9)))
    zero_variance = [value, next_value, value, value]
    a = [*zero_variance, 1, 0, 0, 0, 9]
    b = [*zero_variance, 0, 0, 1, 1, 3]
    lengths = [3, 1, 2, 5, 3, 1, 2, 5, 1]
    accuracy = [0.5, 0.5, 0.5, 0.5, 1, 0, 0, 0, 1]
    rollout = Rollout(list("ddddxxxxo"), {"a": a, "b": b}, lengths, accuracy)

    advantages = call_on_rollout(name, config, rollout).rows

    of_zero_variance_group = advantages[:4]
    of_other_group = advantages[4:8]
    of_group_of_one = advantages[8]
    assert of_zero_variance_group.tolist() == [0, 0, 0, 0]
    assert of_group_of_one == 0
    assert of_other_group.any()


FINITE_EXTREMES = (0.0, -0.0, 1.0, -1.0, 5e-324, 1e-30, 1e-7, 1e16, 1e30)
EXTREMES = (*FINITE_EXTREMES, -1e30, 1e31, math.nan, math.inf)
EXTREME_SETTINGS = {
    "gdpo, mad": ("gdpo", KEYS | {"gdpo": {"whiten": "none", "scale": "mad", "epsilon": 5e-324}}),
    "dgpo at a high temperature": ("dgpo", KEYS | {"dgpo": {"dqw_temp": 1e308}}),
    "hadw with a large lambda": (
        "hadw",
        KEYS | {"hadw": {"anchor": "fixed", "fixed_anchor": 0.0, "lambda_scale": 1e30, "base": "dgpo"}},
    ),
    "maxrl": ("maxrl", {"rewards": {"keys": ["a", "b"]}}),
}
ALL_SETTINGS = VARIANTS | EXTREME_SETTINGS


def extreme_batch(random: np.random.Generator) -> Batch:
    """Return up to eight responses to up to three prompts, with three different extreme rewards at most.

    Raise `VerlExtError` if a reward is infinite or too large.
    """
    size = random.integers(0, 9)
    two_extremes = random.choice(EXTREMES, 2)
    pools = [EXTREMES, FINITE_EXTREMES, (*two_extremes, 1.0)]
    pool = pools[random.integers(3)]
    three_rewards = random.choice(pool, 3)
    return Batch.of(
        random.choice(three_rewards, (size, 2)),
        random.integers(0, 3, size).tolist(),
        keys=("a", "b"),
        lengths=random.integers(0, 9, size),
        accuracy=random.random(size),
    )


@pytest.mark.parametrize(("name", "config"), ALL_SETTINGS.values(), ids=ALL_SETTINGS.keys())
def test_most_extreme_rewards_are_accepted(name, config):
    chain = build(name, Settings.parse(config))
    state = state_of_hadw(config) if name == "hadw" else None
    accepted = 0
    for seed in range(50):
        try:
            chain(extreme_batch(np.random.default_rng(seed)), state)
        except VerlExtError:
            continue
        accepted += 1
    assert accepted > 10


@pytest.mark.parametrize(("name", "config"), ALL_SETTINGS.values(), ids=ALL_SETTINGS.keys())
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.filterwarnings("error")  # numpy warns of an overflow, which would give a wrong number
def test_extreme_rewards_give_finite_numbers_or_an_error_of_the_package(name, config, seed):
    chain = build(name, Settings.parse(config))
    state = state_of_hadw(config) if name == "hadw" else None
    try:
        batch = extreme_batch(np.random.default_rng(seed))
        result = chain(batch, state)
    except VerlExtError:
        return
    assert np.isfinite(result.advantages).all()
    assert np.isfinite([*result.metrics.values()]).all()
