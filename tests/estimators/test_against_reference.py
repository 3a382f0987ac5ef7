"""Each estimator against the plain loops of `tests/reference.py`, on random batches, settings and missing scores.

Each test compares both ways to compute advantages: the core, and the registered function with verl's signature.
"""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.batches import Rollout, rollouts
from tests.estimators.estimator_variants import call_on_rollout, unwhitened
from tests.facts import facts
from verl_ext import Batch, Settings, build
from verl_ext.core.chain import State
from verl_ext.errors import DataError

KEYS = ("a", "b", "c")
XY = {"keys": ["x", "y"]}
WEIGHTS = st.lists(st.sampled_from([1.0, 0.5, 2.0, -1.0, 0.0, 3.25]), min_size=3, max_size=3).filter(any)


def assert_advantages(
    name: str, rollout: Rollout, config: dict[str, Any], expected: list[float], state: State | None = None
) -> State:
    """Compare the core and the registered function with the expected advantages. Return the state after the batch."""
    settings = Settings.parse(config)
    batch = rollout.batch(conditions=settings.rewards.conditions)
    result = build(name, settings)(batch, state)
    np.testing.assert_allclose(result.advantages, expected, rtol=1e-8, atol=1e-8)

    called = call_on_rollout(name, config, rollout, state=state)
    has_tokens = np.array(rollout.lengths) > 0
    np.testing.assert_allclose(called.rows, np.where(has_tokens, expected, 0.0), rtol=1e-8, atol=1e-8)
    assert (called.tensor != 0).sum() <= sum(rollout.lengths)  # no advantage outside the mask
    assert called.state == result.state
    return result.state


def rewards_config(weights: list[float]) -> dict[str, Any]:
    """Return the configuration of the three rewards with these weights."""
    return {"rewards": {"keys": list(KEYS), "weights": weights}}


def conditions_config(conditions: dict[str, tuple[str, float]]) -> dict[str, Any]:
    """Return the setting `algorithm.rewards.conditions` for the conditions as the reference takes them."""
    return {easy: {"reward": hard, "at_least": threshold} for easy, (hard, threshold) in conditions.items()}


@given(
    rollouts(keys=KEYS),
    WEIGHTS,
    st.sampled_from(["std", "mad", "none"]),
    st.sampled_from(["sequence", "token", "none"]),
    st.sampled_from([None, 1e-6, 1e-4, 0.5]),
    st.sampled_from([{}, {"a": ("b", 0.5)}, {"a": ("b", 0.0), "b": ("c", 1.0)}]),
    st.booleans(),
)
def test_gdpo_equals_the_plain_loops(rollout, weights, scale, whiten, epsilon, conditions, norm_by_std):
    divides_rewards = scale == "mad" or (scale == "std" and norm_by_std)
    if not divides_rewards and whiten != "sequence":
        epsilon = None  # no divisor uses it, so that it is rejected
    expected = reference.gdpo(
        rollout.columns,
        rollout.uids,
        rollout.lengths,
        weights=weights,
        scale="none" if scale == "std" and not norm_by_std else scale,
        whiten=whiten,
        epsilon=epsilon,
        conditions=conditions,
    )
    config = rewards_config(weights)
    config["rewards"]["conditions"] = conditions_config(conditions)
    config["gdpo"] = {"scale": scale, "whiten": whiten, "epsilon": epsilon}
    config["norm_adv_by_std_in_grpo"] = norm_by_std or scale == "mad"
    assert_advantages("gdpo", rollout, config, expected)


@given(
    rollouts(keys=KEYS),
    WEIGHTS,
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.5, 1.0, 2.0, 10.0]),
    st.sampled_from(["auto", "token", "sequence", "none"]),
    st.booleans(),
)
def test_dgpo_equals_the_plain_loops(rollout, weights, dgae, dqw, temperature, balance, norm_by_std):
    expected = reference.dgpo(
        reference.weighted_total(list(rollout.columns.values()), weights),
        rollout.uids,
        rollout.lengths,
        rollout.accuracy,
        dgae=dgae,
        dqw=dqw,
        temperature=temperature,
        balance="token" if balance == "auto" else balance,  # verl's default loss is token-mean
        norm_by_std=norm_by_std,
    )
    config = rewards_config(weights)
    config["dgpo"] = {"dgae": dgae, "dqw": dqw, "balance": balance}
    if dqw:
        config["dgpo"]["dqw_temp"] = temperature
    config["norm_adv_by_std_in_grpo"] = norm_by_std or dgae
    assert_advantages("dgpo", rollout, config, expected)


def base_advantages(base: str, rollout: Rollout, weights: list[float]) -> list[float]:
    """Return the advantages of the estimator on which hadw builds."""
    total = reference.weighted_total(list(rollout.columns.values()), weights)
    if base == "gdpo":
        return reference.gdpo(rollout.columns, rollout.uids, rollout.lengths, weights=weights)
    if base == "dgpo":
        return reference.dgpo(total, rollout.uids, rollout.lengths, rollout.accuracy)
    if base == "grpo":
        return reference.grpo(total, rollout.uids)
    return reference.drgrpo(total, rollout.uids)  # also grpo without the standard deviation


@given(
    st.lists(rollouts(keys=KEYS), min_size=1, max_size=5),
    WEIGHTS,
    st.sampled_from(["grpo", "grpo without std", "drgrpo", "gdpo", "dgpo"]),
    st.sampled_from(["soft", "window", "fixed"]),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([1, 2, 3, 10]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from([0.0, 0.1, 0.7]),
)
def test_hadw_over_several_batches_equals_the_plain_loops(batches, weights, base, anchor, scale, window, eta, eta_min):
    settings_of_anchor = {
        "soft": {"history_window": window, "eta": eta, "eta_min": eta_min},
        "window": {"history_window": window},
        "fixed": {"fixed_anchor": 0.4},
    }
    config = rewards_config(weights)
    config["hadw"] = {"base": base.split()[0], "anchor": anchor, "lambda_scale": scale, **settings_of_anchor[anchor]}
    config["norm_adv_by_std_in_grpo"] = base != "grpo without std"
    history = reference.History(anchor, scale, window, eta, eta_min, fixed_anchor=0.4)

    state = None
    for rollout in batches:
        base_values = base_advantages(base, rollout, weights)
        expected = history.reweigh(base_values, rollout.uids, rollout.accuracy)
        new_state = assert_advantages("hadw", rollout, config, expected, state)
        state = json.loads(json.dumps(new_state, allow_nan=False))  # as a run that resumes reads it
        if anchor == "soft" and history.capability is not None:
            assert math.isclose(state["weight_by_history"]["value"], history.capability, abs_tol=1e-12)


@given(
    rollouts(keys=KEYS),
    WEIGHTS,
    st.sampled_from([("hard", 0.2), ("snr", 0.2), ("snr", 0.8), ("snr", 0.0), ("snr", 1.0)]),
    st.sampled_from(["token", "sequence"]),
    st.booleans(),
)
def test_gd2po_equals_the_plain_loops(rollout, weights, conflict_and_tau, whiten, norm_by_std):
    conflict, tau = conflict_and_tau
    expected = reference.gd2po(
        rollout.columns,
        rollout.uids,
        rollout.lengths,
        weights=weights,
        conflict=conflict,
        tau=tau,
        whiten=whiten,
        norm_by_std=norm_by_std,
    )
    config = rewards_config(weights)
    config["gd2po"] = {"conflict": conflict, "tau": tau, "whiten": whiten}
    config["norm_adv_by_std_in_grpo"] = norm_by_std
    assert_advantages("gd2po", rollout, config, expected)


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("conflict", ["hard", "snr"])
@pytest.mark.parametrize("weights", [[1, 1], [1000, 1], [1e-9, 1e-9]])
def test_float32_rewards_conflict_in_the_same_responses_as_float64(size, conflict, weights):
    """In float32, the middle one of 0.1, 0.2 and 0.3 is below the mean only by rounding, so its sign does not count."""
    random = np.random.default_rng(size)
    tenths = random.integers(0, 11, (200 * size, 2)) / 10
    group_of_row = np.repeat(np.arange(200), size).tolist()
    steps = unwhitened(conflict)
    settings = Settings.parse({"rewards": XY | {"weights": weights}, "compose": {"steps": steps}})
    chain = build("compose", settings)

    in_float64 = chain(Batch.of(tenths, group_of_row, keys=("x", "y")))
    in_float32 = chain(Batch.of(tenths.astype(np.float32), group_of_row, keys=("x", "y")))

    assert in_float64.metrics == in_float32.metrics
    assert in_float64.metrics["conflict_fraction"] > 0.2
    np.testing.assert_allclose(in_float32.advantages, in_float64.advantages, atol=1e-5 * weights[0])


def test_gd2po_keeps_a_response_exactly_at_tau():
    """Without division, x is -1 1 0 0 and y is 1 -3 2 0. The first response has the ratio |-1 + 1| / 2 = 0."""
    gd2po = {"conflict": "snr", "tau": 0.0}
    settings = Settings.parse({"rewards": XY, "gd2po": gd2po, "norm_adv_by_std_in_grpo": False})
    x = [1.0, 3.0, 2.0, 2.0]
    y = [4.0, 0.0, 5.0, 3.0]
    batch = Batch.of(np.column_stack([x, y]), list("aaaa"), keys=("x", "y"))

    result = build("gd2po", settings)(batch)

    assert result.metrics["dropped_fraction"] == 0


def test_maxrl_rejects_a_negative_reward_and_explains_the_mapping():
    chain = build("maxrl", Settings())
    batch = Batch.of([[1], [-1.0]], ["p", "p"])
    with pytest.raises(DataError, match=facts("at least 0", "found -1", "'p'", "[-1, 1] to [0, 1]")):
        chain(batch)


def test_maxrl_rejects_a_negative_weight():
    settings = Settings.parse({"rewards": XY | {"weights": [1, -1]}})
    chain = build("maxrl", settings)
    batch = Batch.of([[0, 1], [1, 0]], ["p", "p"], keys=("x", "y"))
    with pytest.raises(DataError, match=facts("no negative weight")):
        chain(batch)
