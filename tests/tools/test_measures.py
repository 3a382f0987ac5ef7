"""The figures against their definitions, by hand or by a slow loop."""

import itertools

import numpy as np
import pytest

from verl_ext.core.groups import Groups
from verl_ext.tools.compare import measures

GROUPS = Groups.of(list("aaabbb"))
STREAM = np.random.default_rng(0)


def fit(advantages, rewards):
    """R^2 of a regression with an intercept, by least squares on the rows."""
    if not rewards.shape[1]:
        return 0.0
    columns = np.column_stack([np.ones(len(rewards)), rewards])
    left = advantages - columns @ np.linalg.lstsq(columns, advantages, rcond=None)[0]
    return 1 - left.var() / advantages.var()


def test_the_shares_are_the_mean_gain_over_all_orders():
    rewards = STREAM.normal(size=(200, 3))
    rewards[:, 1] += rewards[:, 0]
    advantages = rewards @ [1.0, 2.0, -0.5] + STREAM.normal(size=200)
    orders = list(itertools.permutations(range(3)))
    wanted = np.zeros(3)
    for order in orders:
        for at, reward in enumerate(order):
            before, after = list(order[:at]), list(order[: at + 1])
            wanted[reward] += (fit(advantages, rewards[:, after]) - fit(advantages, rewards[:, before])) / len(orders)
    np.testing.assert_allclose(measures.explained(advantages, rewards), wanted, atol=1e-9)


def test_two_equal_rewards_share_what_they_explain_and_a_constant_one_explains_nothing():
    x = STREAM.normal(size=50)
    both = np.column_stack([x, x, np.zeros(50)])
    np.testing.assert_allclose(measures.explained(3 * x, both), [0.5, 0.5, 0], atol=1e-9)
    assert np.isnan(measures.explained(np.zeros(50), x[:, None])).all()


def test_rewards_are_normalised_in_their_group_and_0_where_they_do_not_vary():
    rewards = np.array([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0], [7.0, np.nan], [7.0, 1.0], [7.0, 2.0]])
    wanted = [[-1, 0], [0, 0], [1, 0], [0, 0], [0, -(0.5**0.5)], [0, 0.5**0.5]]
    np.testing.assert_allclose(measures.normalised(rewards, GROUPS), wanted, atol=1e-12)


def measured(advantages, baseline):
    level = measures.by_accuracy(np.array([1 / 3, 1.0]), "accuracy")
    rewards = STREAM.normal(size=(6, 1))
    return measures.measure(np.array(advantages), np.array(baseline), GROUPS, rewards, level)


def test_shares_of_zeros_dead_groups_and_turned_signs():
    found = measured([1.0, 0.0, -1.0, 0.0, 0.0, 0.0], [-1.0, 1.0, -2.0, 0.0, 1.0, 0.0])
    assert (found.dead.value, found.zero.value, found.turned.value) == pytest.approx((1 / 2, 4 / 6, 1 / 6))
    assert found.size == pytest.approx(2 / 6)
    assert found.by_level[[2, 5], 0].tolist() == [2, 0]  # the first group has all of it


def test_the_interval_of_a_bin_is_that_of_the_mean_over_its_groups():
    level = measures.by_accuracy(np.array([0.5] * 4), "accuracy")
    groups = Groups.of(list("aabbccdd"))
    advantages = np.array([1.0, -1, 2, -2, 3, -3, 6, -6])
    found = measures.measure(advantages, advantages, groups, advantages[:, None], level).by_level[2]
    assert found == pytest.approx([1, 1.96 * np.std([1, 2, 3, 6], ddof=1) / 2 / 3])


def test_prompts_are_sorted_by_accuracy():
    bins = measures.by_accuracy(np.array([0, 0.1 + 0.2, 0.25, 2 / 3, 0.9, 1, np.nan]), "accuracy")
    assert bins.ids.tolist() == [0, 2, 1, 3, 4, 5, 6]
    assert len(bins.labels) == 7


def test_what_twenty_rewards_explain_is_not_computed():
    rewards = STREAM.normal(size=(40, 20))
    assert np.isnan(measures.explained(rewards.sum(axis=1), rewards)).all()
