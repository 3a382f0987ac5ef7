"""Each estimator, and combinations of them, against the slow loops of `tests/reference.py`.

Over random batches, settings and missing scores.

Both ways in: the core, and the registered function in verl's convention.
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
from tests.estimators.every import run, unwhitened
from tests.facts import facts
from verl_ext import Batch, Settings, build
from verl_ext.errors import DataError

KEYS = ("a", "b", "c")
WEIGHTS = st.lists(st.sampled_from([1.0, 0.5, 2.0, -1.0, 0.0, 3.25]), min_size=3, max_size=3).filter(any)


def check(name: str, rollout: Rollout, config: dict[str, Any], wanted: list[float], state: Any = None):
    """Compare the core, then the registered function; return the state after this batch."""
    settings = Settings.parse(config)
    found = build(name, settings)(rollout.batch(conditions=settings.rewards.conditions), state)
    np.testing.assert_allclose(found.advantages, wanted, rtol=1e-8, atol=1e-8)
    direct = run(name, config, rollout, state=state)
    counted = np.where(np.array(rollout.lengths) > 0, wanted, 0.0)
    np.testing.assert_allclose(direct.rows, counted, rtol=1e-8, atol=1e-8)
    assert (direct.tensor != 0).sum() <= sum(rollout.lengths)
    assert direct.state == found.state
    return found.state


def rewards(weights: list[float]) -> dict[str, Any]:
    return {"rewards": {"keys": list(KEYS), "weights": weights}}


@given(
    rollouts(keys=KEYS),
    WEIGHTS,
    st.sampled_from(["std", "mad", "none"]),
    st.sampled_from(["sequence", "token", "none"]),
    st.sampled_from([None, 1e-6, 1e-4, 0.5]),
    st.sampled_from([{}, {"a": ("b", 0.5)}, {"a": ("b", 0.0), "b": ("c", 1.0)}]),
    st.booleans(),
)
def test_gdpo(rollout, weights, scale, whiten, epsilon, conditions, norm_by_std):
    has_divisor = scale == "mad" or (scale == "std" and norm_by_std) or whiten == "sequence"
    if not has_divisor:
        epsilon = None  # otherwise it is an error
    wanted = reference.gdpo(
        rollout.columns,
        rollout.uids,
        rollout.lengths,
        weights=weights,
        scale="none" if scale == "std" and not norm_by_std else scale,
        whiten=whiten,
        epsilon=epsilon,
        conditions=conditions,
    )
    written = {easy: {"reward": hard, "at_least": threshold} for easy, (hard, threshold) in conditions.items()}
    gdpo = {"scale": scale, "whiten": whiten, "epsilon": epsilon}
    config = {"gdpo": gdpo, "norm_adv_by_std_in_grpo": norm_by_std or scale == "mad"}
    named = rewards(weights)["rewards"] | {"conditions": written}
    check("gdpo", rollout, {"rewards": named} | config, wanted)


@given(
    rollouts(keys=KEYS),
    WEIGHTS,
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.5, 1.0, 2.0, 10.0]),
    st.sampled_from(["auto", "token", "sequence", "none"]),
    st.booleans(),
)
def test_dgpo(rollout, weights, dgae, dqw, temperature, balance, norm_by_std):
    wanted = reference.dgpo(
        reference.weighted_total(list(rollout.columns.values()), weights),
        rollout.uids,
        rollout.lengths,
        rollout.accuracy,
        dgae=dgae,
        dqw=dqw,
        temperature=temperature,
        balance="token" if balance == "auto" else balance,  # the loss is token-mean unless said otherwise
        norm_by_std=norm_by_std,
    )
    config = rewards(weights) | {
        "dgpo": {"dgae": dgae, "dqw": dqw, "balance": balance} | ({"dqw_temp": temperature} if dqw else {}),
        "norm_adv_by_std_in_grpo": norm_by_std or dgae,
    }
    check("dgpo", rollout, config, wanted)


def base_of(name: str, rollout: Rollout, weights: list[float]) -> list[float]:
    total = reference.weighted_total(list(rollout.columns.values()), weights)
    if name == "gdpo":
        return reference.gdpo(rollout.columns, rollout.uids, rollout.lengths, weights=weights)
    if name == "dgpo":
        return reference.dgpo(total, rollout.uids, rollout.lengths, rollout.accuracy)
    return reference.grpo(total, rollout.uids, norm_by_std=name == "grpo")  # without the std it is drgrpo


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
def test_hadw_over_several_batches(batches, weights, base, anchor, scale, window, eta, eta_min):
    given_settings = {
        "soft": {"history_window": window, "eta": eta, "eta_min": eta_min},
        "window": {"history_window": window},
        "fixed": {"fixed_anchor": 0.4},
    }
    config = rewards(weights) | {
        "hadw": {"base": base.split()[0], "anchor": anchor, "lambda_scale": scale} | given_settings[anchor],
        "norm_adv_by_std_in_grpo": base != "grpo without std",
    }
    memory = reference.History(anchor, scale, window, eta, eta_min, fixed_anchor=0.4)
    state = None
    for rollout in batches:
        wanted = memory.reweigh(base_of(base, rollout, weights), rollout.uids, rollout.accuracy)
        state = json.loads(json.dumps(check("hadw", rollout, config, wanted, state), allow_nan=False))  # a resume
        if anchor == "soft" and memory.capability is not None:
            assert math.isclose(state["weight_by_history"]["value"], memory.capability, abs_tol=1e-12)


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("conflict", ["hard", "snr"])
@pytest.mark.parametrize("weights", [[1, 1], [1000, 1], [1e-9, 1e-9]])
def test_a_reward_of_tenths_in_float32_conflicts_as_in_float64(size, conflict, weights):
    """The middle one of 0.1, 0.2, 0.3 in float32 is below its group's mean by rounding: that is no sign."""
    tenths = np.random.default_rng(size).integers(0, 11, (200 * size, 2)) / 10
    uids = [row // size for row in range(len(tenths))]
    rewards = {"rewards": {"keys": ["x", "y"], "weights": weights}}
    chain = build("compose", Settings.parse(rewards | {"compose": {"steps": unwhitened(conflict)}}))
    exact, rounded = (chain(Batch.of(each, uids, keys=("x", "y"))) for each in (tenths, tenths.astype(np.float32)))
    assert exact.metrics == rounded.metrics
    assert exact.metrics["conflict_fraction"] > 0.2
    np.testing.assert_allclose(rounded.advantages, exact.advantages, atol=1e-5 * weights[0])


def test_maxrl_rejects_a_negative_reward_and_says_how_to_map_it():
    batch = Batch.of([[1], [-1.0]], ["p", "p"])
    with pytest.raises(DataError, match=facts("at least 0", "found -1", "'p'", "[-1, 1] to [0, 1]")):
        build("maxrl", Settings())(batch)
    weighed = Settings.parse({"rewards": {"keys": ["x", "y"], "weights": [1, -1]}})
    with pytest.raises(DataError, match=facts("no negative weight")):
        build("maxrl", weighed)(Batch.of([[0, 1], [1, 0]], ["p", "p"], keys=("x", "y")))


@given(
    rollouts(keys=KEYS),
    WEIGHTS,
    st.sampled_from([("hard", 0.2), ("snr", 0.2), ("snr", 0.8), ("snr", 0.0), ("snr", 1.0)]),
    st.sampled_from(["token", "sequence"]),
    st.booleans(),
)
def test_gd2po(rollout, weights, conflict, whiten, norm_by_std):
    kind, tau = conflict
    wanted = reference.gd2po(
        rollout.columns,
        rollout.uids,
        rollout.lengths,
        weights=weights,
        conflict=kind,
        tau=tau,
        whiten=whiten,
        norm_by_std=norm_by_std,
    )
    section = {"conflict": kind, "tau": tau, "whiten": whiten}
    check("gd2po", rollout, rewards(weights) | {"gd2po": section, "norm_adv_by_std_in_grpo": norm_by_std}, wanted)


def test_a_response_exactly_at_tau_is_kept():
    """Without std, x of the group is -1 1 0 0 and y 1 -3 2 0: the first response has |-1 + 1| / 2 = 0."""
    section = {"conflict": "snr", "tau": 0.0}
    settings = Settings.parse({"rewards": {"keys": ["x", "y"]}, "gd2po": section, "norm_adv_by_std_in_grpo": False})
    batch = Batch.of([[1.0, 4.0], [3, 0], [2, 5], [2, 3]], list("aaaa"), keys=("x", "y"))
    assert build("gd2po", settings)(batch).metrics["dropped_fraction"] == 0
