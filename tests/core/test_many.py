"""Steps that look at several rewards: what they are with one reward, at their limits, and with weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import Rollout, rollouts
from tests.facts import facts
from verl_ext import Centre, Chain, ScaleByStd, Settings, WeighAndSum, Whiten, build
from verl_ext.core.batch import Batch
from verl_ext.core.many import ScaleByCommonStd, ScaleByCorrelation, SoftMin, WeighByDensity
from verl_ext.core.turns import Turns
from verl_ext.errors import ConfigurationError

AB = ("a", "b")
SEVERAL = {"nan": False, "lengths": 1, "smallest": 2}


def advantages(rollout: Rollout, *steps, count: int | None = None) -> np.ndarray:
    return Chain((Centre(), *steps))(rollout.batch(count)).advantages


@given(rollout=rollouts(**SEVERAL))
def test_with_one_reward_the_common_std_is_its_own_and_its_correlation_1(rollout):
    centred = advantages(rollout, WeighAndSum(), count=1)
    std = np.sqrt(
        [np.mean([centred[j] ** 2 for j, uid in enumerate(rollout.uids) if uid == own]) for own in rollout.uids]
    )
    found = advantages(rollout, ScaleByCommonStd(), WeighAndSum(), count=1)
    np.testing.assert_allclose(found * std, centred, atol=1e-12)
    found = advantages(rollout, ScaleByCorrelation(epsilon=0.25), WeighAndSum(), count=1)
    np.testing.assert_allclose(found, centred / np.sqrt(1.25), atol=1e-12)


@given(rollout=rollouts(), factor=st.sampled_from([0.25, 3.0]))
def test_a_common_factor_of_the_weights_changes_nothing_with_a_common_std(rollout, factor):
    found = [
        advantages(rollout, ScaleByCommonStd(weights), WeighAndSum(weights))
        for weights in ((1.0, 0.5), (factor, 0.5 * factor))
    ]
    np.testing.assert_allclose(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("step", [ScaleByCommonStd, ScaleByCorrelation])
@given(rollout=rollouts(nan=False))
def test_a_reward_of_weight_0_is_as_if_it_were_not_there(step, rollout):
    weights = (2.0, 0.0)
    found = advantages(rollout, step(weights), WeighAndSum(weights))
    alone = advantages(rollout, step((2.0,)), WeighAndSum((2.0,)), count=1)
    np.testing.assert_allclose(found, alone, rtol=1e-9, atol=1e-12)


@given(rollout=rollouts())
def test_of_a_weight_the_correlations_see_the_sign_alone(rollout):
    opposite = Rollout(
        rollout.uids,
        {"a": rollout.columns["a"], "b": [-x for x in rollout.columns["b"]]},
        rollout.lengths,
        rollout.accuracy,
    )
    found = advantages(rollout, ScaleByCorrelation((3.0, -0.5)), WeighAndSum((1.0, -1.0)))
    np.testing.assert_allclose(found, advantages(opposite, ScaleByCorrelation(), WeighAndSum()), rtol=1e-9, atol=1e-12)


def test_a_negative_weight_is_refused_with_a_common_std():
    algorithm = {
        "rewards": {"keys": list(AB), "weights": [1.0, -0.5]},
        "compose": {"steps": ["centre", "scale_by_common_std", "weigh_and_sum"]},
    }
    with pytest.raises(ConfigurationError, match=facts("steps[1]", "scale_by_common_std", "-0.5", "at least 0")):
        build("compose", Settings.parse(algorithm))


@given(rollout=rollouts())
def test_a_soft_minimum_lies_between_the_mean_and_the_least_and_reaches_both(rollout):
    batch = rollout.batch()
    scored = ~np.isnan(batch.returns).all(axis=1)
    values = batch.returns[scored]
    wanted = np.nanmean(values, axis=1), np.nanmin(values, axis=1)
    mean, soft, least = (SoftMin(k).apply(batch.returns, batch)[scored, 0] for k in (1e-9, 1.0, 1e6))
    np.testing.assert_allclose(mean, wanted[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(least, wanted[1], rtol=1e-6, atol=1e-6)
    assert (wanted[1] <= soft).all()
    assert (soft <= wanted[0] + 1e-12).all()


@given(rollout=rollouts(keys=("a",), lengths=1))
def test_rewards_that_vary_in_the_same_groups_are_weighed_as_in_gdpo(rollout):
    columns = {"a": rollout.columns["a"], "b": [x * x * x for x in rollout.columns["a"]]}
    both = Rollout(rollout.uids, columns, rollout.lengths, rollout.accuracy)
    found = advantages(both, ScaleByStd(1e-6), WeighByDensity(), WeighAndSum(), Whiten("token"))
    gdpo = build("gdpo", Settings.parse({"rewards": {"keys": list(AB)}, "gdpo": {"whiten": "token"}}))
    np.testing.assert_allclose(found, gdpo(both.batch()).advantages, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("often", "rarely", "weight"), [(9, 1, 3.0), (4, 2, 2**0.5), (30, 1, 5.0), (3, 0, 1.0)])
def test_a_rare_reward_has_the_root_of_the_ratio_up_to_5(often, rarely, weight):
    rewards = [[sign, sign * (group < rarely)] for group in range(often) for sign in (1.0, -1.0)]
    labels = [group for group in range(often) for _ in range(2)]
    batch = Batch.of([*rewards, [1.0, 1.0]], [*labels, "alone"], keys=AB)
    result = WeighByDensity().transform(batch.returns, batch, None)
    assert result.metrics == pytest.approx({"weight/a": 1.0, "weight/b": weight})
    np.testing.assert_allclose(result.values, batch.returns * [1.0, weight])
    positive = WeighByDensity("positive").transform(batch.returns, batch, None).values
    np.testing.assert_array_equal(positive, np.where(batch.returns > 0, result.values, batch.returns))


def test_by_turn_the_groups_of_the_density_are_those_of_a_turn():
    rewards = [[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    batch = Batch.of(rewards, ["p"] * 4, keys=AB, turns=Turns.of_counts([2, 2], columns=(0, 1)))
    assert batch.returns.tolist() == [[2, 0], [1, 0], [1, 1], [0, 0]]  # a varies at both turns, b at the first
    metrics = WeighByDensity().transform(batch.returns, batch, None).metrics
    assert metrics == pytest.approx({"weight/a": 1.0, "weight/b": 2**0.5})


LISTS = {
    "dara": (WeighByDensity(), WeighAndSum()),
    "dara, positive": (WeighByDensity("positive"), WeighAndSum()),
    "dvao": (ScaleByCommonStd(), WeighAndSum()),
    "corrgrpo": (ScaleByCorrelation(), WeighAndSum()),
    "rvpo": (SoftMin(),),
}


@pytest.mark.parametrize("steps", LISTS.values(), ids=LISTS.keys())
def test_a_group_of_one_and_one_without_variance_are_exactly_0_before_whitening(steps):
    dead = np.float32(0.7)
    rows = [[dead, 0.1], [np.nextafter(dead, np.float32(1)), 0.1], [1, 0], [0, 1], [0, 1], [9.0, 3.0]]
    found = Chain((Centre(), *steps))(Batch.of(rows, list("ddxxxo"), keys=AB)).advantages
    assert found[[0, 1, 5]].tolist() == [0] * 3
    if steps != LISTS["rvpo"]:  # x cancels up to a factor of the weights, which are 1
        assert np.abs(found[2:5]).max() == 0
    else:
        assert (found[2:5] < 0).all()


@pytest.mark.parametrize("name", ["dvao", "corrgrpo"])
@given(seed=st.integers(0, 2**32 - 1))
def test_what_cancels_but_for_its_rounding_to_float32_is_exactly_0(name, seed):
    draw = np.random.default_rng(seed)
    first = draw.integers(0, 11, 8) / 10
    rewards = np.stack([first, draw.choice([1.0, 10.0]) - first], axis=1).astype(np.float32)
    found = Chain((Centre(), *LISTS[name]))(Batch.of(rewards, list("aaaabbbb"), keys=AB)).advantages
    assert found.tolist() == [0] * 8
