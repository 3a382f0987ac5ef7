"""Combinations of the methods, on numbers: lists of steps against the plain loops of `tests/reference.py`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.batches import ACC, FMT, LENGTHS, UIDS, Rollout, rollouts
from tests.calls import call
from tests.estimators.every import components
from tests.estimators.test_against_reference import KEYS, WEIGHTS, check
from verl_ext import RunState

STD = ["centre", "scale_by_std", "weigh_and_sum", "whiten"]
DGPO = ["weigh_and_sum", "centre", "scale_by_mad", "balance", "weigh_by_difficulty"]


def listed(steps, weights, **more):
    return {"rewards": {"keys": list(KEYS), "weights": weights}, "compose": {"steps": steps, **more}}


def gdpo(rollout, weights, **given):
    return reference.gdpo(rollout.columns, rollout.uids, rollout.lengths, weights=weights, **given)


def by_difficulty(base, rollout, temperature):
    """DQW on any base: `B_v softmax(-acc / T)` over the groups whose base varies."""
    valid = [
        rows for rows in reference.groups(rollout.uids).values() if reference.has_variance([base[r] for r in rows])
    ]
    out = list(base)
    for rows, weight in zip(valid, reference.difficulty_weights(valid, rollout.accuracy, temperature), strict=True):
        for row in rows:
            out[row] *= weight
    return out


@given(rollouts(keys=KEYS), WEIGHTS, st.sampled_from([1e-6, 1e-4]))
def test_gdpo_with_the_mean_absolute_deviation(rollout, weights, epsilon):
    steps = ["centre", {"step": "scale_by_mad", "epsilon": epsilon}, "weigh_and_sum"]
    wanted = gdpo(rollout, weights, scale="mad", epsilon=epsilon)
    check("compose", rollout, listed([*steps, {"step": "whiten", "epsilon": epsilon}], weights), wanted)


# Small differences between tiny sums decide whether a group varies, which weights of three digits would bring about.
@given(rollouts(keys=KEYS, nan=False), st.sampled_from([0.5, 2.0]))
def test_gdpo_weighed_by_difficulty(rollout, temperature):
    weights = [1.0, 0.5, 2.0]
    steps = [*STD, {"step": "weigh_by_difficulty", "dqw_temp": temperature}]
    wanted = by_difficulty(gdpo(rollout, weights), rollout, temperature)
    check("compose", rollout, listed(steps, weights), wanted)


@pytest.mark.parametrize(("base", "steps"), [("gdpo", STD), ("dgpo", DGPO)])
@given(batches=st.lists(rollouts(keys=KEYS), min_size=1, max_size=4), window=st.sampled_from([1, 3, 10]))
def test_gdpo_and_dgpo_weighed_by_history(base, steps, batches, window):
    weights = [1.0, 0.5, 2.0]
    config = listed([*steps, {"step": "weigh_by_history", "history_window": window, "lambda_scale": 1.0}], weights)
    memory, run = reference.History("soft", 1.0, window), RunState()
    for rollout in batches:
        if base == "gdpo":
            values = gdpo(rollout, weights)
        else:
            total = reference.weighted_total(list(rollout.columns.values()), weights)
            values = reference.dgpo(total, rollout.uids, rollout.lengths, rollout.accuracy)
        wanted = memory.reweigh(values, rollout.uids, rollout.accuracy)
        check("compose", rollout, config, wanted, run)


@given(rollouts(keys=KEYS), WEIGHTS, st.sampled_from([0.0, 0.5, 1.0]))
def test_conditioned_rewards_without_whitening(rollout, weights, threshold):
    steps = [{"step": "condition", "conditions": {"a": {"on": "b", "at_least": threshold}}}, *STD[:-1]]
    wanted = gdpo(rollout, weights, conditions={"a": ("b", threshold)}, whiten="none")
    check("compose", rollout, listed(steps, weights), wanted)


@given(rollouts(keys=KEYS), WEIGHTS)
def test_conditioned_rewards_under_dgpo(rollout, weights):
    """The condition is no privilege of gdpo."""
    kept = {name: list(column) for name, column in rollout.columns.items()}
    for row, hard in enumerate(rollout.columns["b"]):
        if np.isnan(hard):
            kept["a"][row] = hard
        elif hard < 0.5 and not np.isnan(kept["a"][row]):
            kept["a"][row] = 0.0
    total = reference.weighted_total(list(kept.values()), weights)
    wanted = reference.dgpo(total, rollout.uids, rollout.lengths, rollout.accuracy)
    steps = [{"step": "condition", "conditions": {"a": {"on": "b", "at_least": 0.5}}}, *DGPO]
    check("compose", rollout, listed(steps, weights), wanted)


@given(rollouts(keys=KEYS), WEIGHTS)
def test_drgrpo_per_reward(rollout, weights):
    columns = [reference.centred(column, rollout.uids) for column in rollout.columns.values()]
    wanted = reference.learnt(reference.weighted_total(columns, weights))
    check("compose", rollout, listed(["centre", "weigh_and_sum"], weights), wanted)


WORKED = Rollout(UIDS, {"acc": ACC, "fmt": FMT}, LENGTHS, ACC)


def worked(*steps):
    config = {"rewards": {"keys": ["acc", "fmt"]}, "compose": {"steps": list(steps)}}
    return call("compose", [0.0] * 12, UIDS, LENGTHS, config=config, components=components(WORKED)).rows


def test_drgrpo_per_reward_is_by_hand_the_centred_sum():
    # acc [1000 | 1110 | 0000], fmt [1100 | 1011 | 0100]; means 1/4 3/4 0 and 1/2 3/4 1/4.
    wanted = [1.25, 0.25, -0.75, -0.75, 0.5, -0.5, 0.5, -0.5, -0.25, 0.75, -0.25, -0.25]
    np.testing.assert_allclose(worked("centre", "weigh_and_sum"), wanted, atol=1e-15)


def test_the_mean_absolute_deviation_per_reward_by_hand():
    # acc: A +-3/4, -1/4 by 3/8; B the reverse; C 0. fmt: A +-1/2 by 1/2; B 1/4, -3/4 by 3/8; C -1/4, 3/4 by 3/8.
    acc = [2, -2 / 3, -2 / 3, -2 / 3, 2 / 3, 2 / 3, 2 / 3, -2, 0, 0, 0, 0]
    fmt = [1, 1, -1, -1, 2 / 3, -2, 2 / 3, 2 / 3, -2 / 3, 2, -2 / 3, -2 / 3]
    found = worked("centre", {"step": "scale_by_mad", "epsilon": 1e-15}, "weigh_and_sum")
    np.testing.assert_allclose(found, np.add(acc, fmt), atol=1e-12)


def test_the_weights_of_gdpo_by_difficulty_by_hand():
    # All three groups vary in a reward; accuracies 1/4, 3/4 and 0, which counts as 1; T = 2.
    odds = np.exp(-np.array([0.25, 0.75, 1.0]) / 2)
    factor = np.repeat(3 * odds / odds.sum(), 4)
    np.testing.assert_allclose(worked(*STD, "weigh_by_difficulty"), worked(*STD) * factor, rtol=1e-12)
