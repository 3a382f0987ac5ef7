"""Sums, zeros, shifts and scales of every estimator's advantages."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import Rollout, rollouts
from tests.calls import call
from tests.estimators.every import CENTRED, ESTIMATORS, EVERY, KEEPS_DEAD, KEYS, run
from verl_ext import RunState


@CENTRED
@given(rollout=rollouts(lengths=1))
def test_a_group_adds_up_to_zero(name, config, rollout):
    found = run(name, config, rollout).rows
    for uid in set(rollout.uids):
        assert sum(found[i] for i, other in enumerate(rollout.uids) if other == uid) == pytest.approx(0, abs=1e-8)


@given(rollout=rollouts(lengths=1))
def test_gdpo_whitened_over_tokens_adds_up_to_zero_over_tokens(rollout):
    found = run(*ESTIMATORS["gdpo over tokens"], rollout).rows
    assert np.dot(found, rollout.lengths) == pytest.approx(0, abs=1e-8)


@EVERY
def test_a_group_of_one_has_no_advantage(name, config):
    if name == "gdpo":
        config = config | {"gdpo": {}}  # over tokens 0 is shifted, as in verl
    rollout = Rollout(list("abbc"), {"a": [1.0, 1, 0, 0], "b": [3.0, 0, 1, 9]}, [2] * 4, [1.0, 1, 0, 0])
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


@KEEPS_DEAD
def test_a_batch_without_any_variance_is_exactly_zero(name, config):
    rollout = Rollout(list("aabb"), {"a": [0.2] * 4, "b": [1.0, 1, 0, 0]}, [1, 2, 3, 4], [1.0, 1, 0, 0])
    assert run(name, config, rollout).rows.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["drgrpo", "dgpo", "hadw"])
def test_one_reward_key_is_the_score(name):
    scores, uids = [1.0, 0.0, 0.0, 1.0, 0.5], list("aaabb")
    fields = {"acc": np.array(scores), "x": np.array(scores)}
    by_score = call(name, scores, uids, components={"acc": fields["acc"]})
    by_key = call(name, [0.0] * 5, uids, config={"rewards": {"keys": ["x"]}}, components=fields)
    np.testing.assert_array_equal(by_key.rows, by_score.rows)
    assert (by_key.rows != 0).any()


def test_gdpo_of_one_reward_is_whitened_grpo():
    """Groups [1, 0] and [1, 0, 0, 0]: GRPO +-0.707106, 1.499997, -0.499999 x3; sum of squares 4, std sqrt(4/5)."""
    found = call("gdpo", [0.0] * 6, list("aabbbb"), config={"rewards": {"keys": ["x"]}},
                 components={"x": np.array([1.0, 0, 1, 0, 0, 0])})  # fmt: skip
    std = math.sqrt(4 / 5)
    wanted = [0.707107 / std, -0.707107 / std, 1.5 / std, *[-0.5 / std] * 3]
    np.testing.assert_allclose(found.rows, wanted, atol=1e-5)


SHIFTED = st.sampled_from([-3.0, 0.5, 16.0])


@EVERY
@given(rollout=rollouts(), shift=SHIFTED)
def test_a_constant_added_to_a_reward_changes_nothing(name, config, rollout, shift):
    """Exact numbers (multiples of 1/64). Where a weighted sum is taken, all of its parts must be scored."""
    if name != "gdpo" and any(map(math.isnan, rollout.columns["a"] + rollout.columns["b"])):
        return
    moved = dataclasses.replace(rollout, columns=rollout.columns | {"a": [x + shift for x in rollout.columns["a"]]})
    np.testing.assert_allclose(run(name, config, moved).rows, run(name, config, rollout).rows, atol=1e-9, rtol=1e-9)


@given(rollout=rollouts(), factor=st.sampled_from([0.25, 2.0, 8.0]))
def test_doubled_rewards_double_the_advantages_of_drgrpo(rollout, factor):
    scaled = dataclasses.replace(
        rollout, columns={key: [x * factor for x in column] for key, column in rollout.columns.items()}
    )
    np.testing.assert_allclose(run("drgrpo", KEYS, scaled).rows, run("drgrpo", KEYS, rollout).rows * factor, atol=1e-9)


@pytest.mark.parametrize("estimator", ["gdpo", "dgpo", "dgpo by sequences, std", "hadw on grpo"])
@given(rollout=rollouts(), factor=st.sampled_from([2.0, 8.0]))
def test_the_scale_of_rewards_matters_by_epsilon_only(estimator, rollout, factor):
    """epsilon is at most 1e-4 on a sum of deviations of at least 1/64 * 1/2 here: 1.3 % at the very most."""
    name, config = ESTIMATORS[estimator]
    scaled = dataclasses.replace(
        rollout, columns={key: [x * factor for x in column] for key, column in rollout.columns.items()}
    )
    np.testing.assert_allclose(run(name, config, scaled).rows, run(name, config, rollout).rows, rtol=1.3e-2, atol=1e-4)


@given(rollout=rollouts(), factor=st.sampled_from([0.125, 4.0]))
def test_gdpo_gives_one_reward_no_more_weight_for_its_scale(rollout, factor):
    scaled = dataclasses.replace(rollout, columns=rollout.columns | {"a": [x * factor for x in rollout.columns["a"]]})
    np.testing.assert_allclose(run("gdpo", KEYS, scaled).rows, run("gdpo", KEYS, rollout).rows, rtol=1e-2, atol=1e-3)


@given(rollout=rollouts())
def test_dgae_gives_each_valid_group_a_sum_of_its_size(rollout):
    """`sum_g |A| = n_g`, less 1e-4 of the sum of deviations; before balancing and weighing."""
    config = {"rewards": {"keys": ["a"]}, "dgpo": {"balance": "none", "dqw": False}}
    lengths = [1] * len(rollout.uids)
    found = run("dgpo", config, dataclasses.replace(rollout, lengths=lengths)).rows
    for uid in set(rollout.uids):
        rows = [i for i, other in enumerate(rollout.uids) if other == uid]
        known = [rollout.columns["a"][i] for i in rows if not math.isnan(rollout.columns["a"][i])]
        deviation = sum(abs(x - sum(known) / len(known)) for x in known)
        wanted = len(known) * deviation / (deviation + 1e-4) if deviation > 1e-9 else 0
        assert np.abs(found[rows]).sum() == pytest.approx(wanted, abs=1e-9)


@given(rollout=rollouts(lengths=1))
def test_balanced_over_tokens_the_loss_is_the_mean_over_valid_tokens(rollout):
    """The mean over all tokens of z A is the mean over the tokens of valid groups of A: of |A|, which is not 0."""
    plain = run("dgpo", KEYS | {"dgpo": {"balance": "none", "dqw": False}}, rollout).rows
    balanced = run("dgpo", KEYS | {"dgpo": {"balance": "token", "dqw": False}}, rollout).rows
    lengths = np.array(rollout.lengths)
    live = {uid for uid, a in zip(rollout.uids, plain, strict=True) if a != 0}
    valid = sum(length for uid, length in zip(rollout.uids, rollout.lengths, strict=True) if uid in live)
    if valid:
        over_all = (np.abs(balanced) * lengths).sum() / lengths.sum()
        assert over_all == pytest.approx((np.abs(plain) * lengths).sum() / valid)


@pytest.mark.parametrize("base", ["grpo", "drgrpo", "gdpo", "dgpo"])
@given(rollout=rollouts(lengths=1))
def test_hadw_flips_no_sign_and_leaves_zero(base, rollout):
    config = KEYS | {"hadw": {"base": base}}
    unweighed = run("hadw", config, rollout, state=RunState()).rows  # the first batch has Phi = 1
    assert (np.sign(run("hadw", config, rollout).rows) == np.sign(unweighed)).all()
