"""The step `weight_by_density`. This file is the model of a test of a step, to be copied for a new step.

It shows an example whose numbers a reader can verify by hand, a table of cases, and a property of random batches.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import Rollout, rollouts
from verl_ext.core.batch import Batch
from verl_ext.core.cross_reward import WeightByDensity
from verl_ext.core.turns import Turns


def batch_of_pairs(groups_where_a_varies: int, groups_where_b_varies: int) -> Batch:
    """Return groups of two responses. A reward is 1 and -1 in the groups where it varies, and 0 in the others."""
    group_count = max(groups_where_a_varies, groups_where_b_varies)
    rewards = []
    labels = []
    for group in range(group_count):
        a = 1.0 if group < groups_where_a_varies else 0.0
        b = 1.0 if group < groups_where_b_varies else 0.0
        rewards += [[a, b], [-a, -b]]
        labels += [group, group]
    return Batch.of(rewards, labels, keys=("a", "b"))


def test_a_reward_that_varies_in_fewer_groups_gets_more_weight():
    """`a` varies in both groups and `b` in one. So their weights are sqrt(2 / 2) = 1 and sqrt(2 / 1) = 1.414."""
    batch = batch_of_pairs(groups_where_a_varies=2, groups_where_b_varies=1)

    result = WeightByDensity().transform(batch.returns, batch, None)

    assert result.metrics == pytest.approx({"weight/a": 1.0, "weight/b": 1.414}, abs=0.0005)
    expected_values = [[1.0, 1.414], [-1.0, -1.414], [1.0, 0.0], [-1.0, 0.0]]
    np.testing.assert_allclose(result.values, expected_values, atol=0.0005)


@pytest.mark.parametrize(
    ("groups_where_a_varies", "groups_where_b_varies", "weight_of_b"),
    [
        pytest.param(4, 4, 1.0, id="as often"),
        pytest.param(4, 2, 2**0.5, id="half as often"),
        pytest.param(9, 1, 3.0, id="in one group of nine"),
        pytest.param(30, 1, 5.0, id="at most 5"),  # instead of sqrt(30) = 5.48
        pytest.param(3, 0, 1.0, id="in no group"),
    ],
)
def test_the_weight_is_the_root_of_the_ratio_and_at_most_5(groups_where_a_varies, groups_where_b_varies, weight_of_b):
    batch = batch_of_pairs(groups_where_a_varies, groups_where_b_varies)

    result = WeightByDensity().transform(batch.returns, batch, None)

    assert result.metrics == pytest.approx({"weight/a": 1.0, "weight/b": weight_of_b})
    np.testing.assert_allclose(result.values, batch.returns * [1.0, weight_of_b])


def test_the_positive_variant_weights_only_values_above_0():
    """The weight of `b` is sqrt(4 / 1) = 2."""
    batch = batch_of_pairs(groups_where_a_varies=4, groups_where_b_varies=1)

    result = WeightByDensity("positive").transform(batch.returns, batch, None)

    assert result.values[:2].tolist() == [[1.0, 2.0], [-1.0, -1.0]]


def test_a_group_of_one_response_does_not_count():
    """`b` varies in one of the four groups of `a`. Its score in a group of one does not make it more frequent."""
    pairs = batch_of_pairs(groups_where_a_varies=4, groups_where_b_varies=1)
    labels = [*pairs.groups.ids.tolist(), "alone"]
    batch = Batch.of([*pairs.rewards, [1.0, 1.0]], labels, keys=("a", "b"))

    result = WeightByDensity().transform(batch.returns, batch, None)

    assert result.metrics == pytest.approx({"weight/a": 1.0, "weight/b": 2.0})


def test_per_turn_the_groups_of_each_turn_count():
    """Two responses of two turns. `a` varies at both turns, and `b` at the first turn only."""
    rewards = [[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    turns = Turns.of_counts([2, 2], columns=(0, 1))
    batch = Batch.of(rewards, ["p"] * 4, keys=("a", "b"), turns=turns)
    assert batch.returns.tolist() == [[2, 0], [1, 0], [1, 1], [0, 0]]

    result = WeightByDensity().transform(batch.returns, batch, None)

    assert result.metrics == pytest.approx({"weight/a": 1.0, "weight/b": 2**0.5})


@given(rollout=rollouts(keys=("a", "b")), factor=st.sampled_from([0.25, 3.0, -1.0]))
def test_the_weights_do_not_depend_on_the_scale_of_a_reward(rollout: Rollout, factor: float):
    """Random groups, some of them with zero variance, of one response, or with rewards that are not scored."""
    scaled_a = [factor * reward for reward in rollout.columns["a"]]
    scaled_rollout = replace(rollout, columns={"a": scaled_a, "b": rollout.columns["b"]})
    batch = rollout.batch()
    scaled_batch = scaled_rollout.batch()

    result = WeightByDensity().transform(batch.returns, batch, None)
    scaled_result = WeightByDensity().transform(scaled_batch.returns, scaled_batch, None)

    assert scaled_result.metrics == result.metrics
