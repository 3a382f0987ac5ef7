"""Each estimator, and combinations of them, against the slow loops of `tests/reference.py`.

Over random batches, settings and missing scores.

Both ways in: the core, and the registered function in verl's convention.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.batches import Rollout, rollouts
from tests.estimators.every import run
from verl_ext import Settings, build

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


@given(rollouts(keys=KEYS), WEIGHTS)
def test_drgrpo(rollout, weights):
    total = reference.weighted_total(list(rollout.columns.values()), weights)
    check("drgrpo", rollout, rewards(weights), reference.drgrpo(total, rollout.uids))


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
    written = {easy: {"on": hard, "at_least": threshold} for easy, (hard, threshold) in conditions.items()}
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
            assert math.isclose(state["weigh_by_history"]["value"], memory.capability, abs_tol=1e-12)


# Small differences between tiny sums decide whether a group varies, which weights of three digits would bring about.
@given(rollouts(keys=KEYS, nan=False), st.sampled_from([0.5, 2.0]))
def test_gdpo_weighed_by_difficulty(rollout, temperature):
    """`B_v softmax(-acc / T)` over the groups whose advantage varies."""
    weights = [1.0, 0.5, 2.0]
    wanted = reference.gdpo(rollout.columns, rollout.uids, rollout.lengths, weights=weights)
    groups = reference.groups(rollout.uids).values()
    valid = [rows for rows in groups if reference.has_variance([wanted[row] for row in rows])]
    for rows, weight in zip(valid, reference.difficulty_weights(valid, rollout.accuracy, temperature), strict=True):
        for row in rows:
            wanted[row] *= weight
    difficulty = {"step": "weigh_by_difficulty", "dqw_temp": temperature}
    steps = ["centre", "scale_by_std", "weigh_and_sum", "whiten", difficulty]
    check("compose", rollout, rewards(weights) | {"compose": {"steps": steps}}, wanted)
