"""The figures against their definitions, by hand or by a slow loop."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from verl_ext.compare import measures
from verl_ext.compare.tables import blocks
from verl_ext.core.groups import Groups

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
    found = measures.explained(advantages, rewards)
    np.testing.assert_allclose(found, wanted, atol=1e-9)
    assert found.sum() == pytest.approx(fit(advantages, rewards))


def test_two_equal_rewards_share_what_they_explain_and_a_constant_one_explains_nothing():
    x = STREAM.normal(size=50)
    np.testing.assert_allclose(
        measures.explained(3 * x, np.column_stack([x, x, np.zeros(50)])), [0.5, 0.5, 0], atol=1e-9
    )
    assert np.isnan(measures.explained(np.zeros(50), x[:, None])).all()


def test_rewards_are_normalised_in_their_group_and_0_where_they_do_not_vary():
    rewards = np.array([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0], [7.0, np.nan], [7.0, 1.0], [7.0, 2.0]])
    wanted = [[-1, 0], [0, 0], [1, 0], [0, 0], [0, -(0.5**0.5)], [0, 0.5**0.5]]
    np.testing.assert_allclose(measures.normalised(rewards, GROUPS), wanted, atol=1e-12)


def test_ranks_share_their_mean_where_values_are_equal_up_to_rounding():
    x = np.array([0.3, 0.1 + 0.2, 1.0, 2.0])
    y = np.array([1.0, 1.0, 2.0, 3.0])
    assert measures.spearman(x, y) == pytest.approx(1.0)
    assert measures.spearman(x, -y) == pytest.approx(-1.0)
    assert measures.spearman(np.exp(x), x) == pytest.approx(1.0)
    assert math.isnan(measures.spearman(x, np.ones(4)))


def found(advantages, baseline):
    level = measures.by_level(np.array([1.0, 0, 0, 1, 1, 1]), GROUPS, "accuracy", unit=True)
    length = measures.by_length(np.array([1.0, 2, 3, 4, 5, 6]), "tokens")
    rewards = STREAM.normal(size=(6, 1))
    return measures.measure(np.array(advantages), np.array(baseline), GROUPS, rewards, level, length)


def test_shares_of_zeros_dead_groups_and_turned_signs():
    result = found([1.0, 0.0, -1.0, 0.0, 0.0, 0.0], [-1.0, 1.0, -2.0, 0.0, 1.0, 0.0])
    assert result.dead == 0.5
    assert result.zero == pytest.approx(4 / 6)
    assert result.turned == pytest.approx(1 / 6)  # from or to 0 is not another sign
    assert result.size == pytest.approx(2 / 6)


def test_the_size_by_accuracy_and_by_length():
    result = found([1.0, 0.0, -1.0, 3.0, -4.0, 5.0], [0.0] * 6)
    np.testing.assert_allclose(result.by_accuracy, [np.nan, np.nan, 2 / 3, np.nan, np.nan, 4])
    assert result.by_length is not None
    assert np.nansum(result.by_length * measures.by_length(np.arange(1.0, 7), "tokens").counts) == pytest.approx(14)


def test_a_factor_is_no_distance_and_a_turned_group_is_the_furthest():
    base = np.array([1.0, -1.0, 0.0, 2.0, -1.0, -1.0])
    np.testing.assert_allclose(measures.distances(3 * base, base, GROUPS), 0, atol=1e-12)
    turned = np.where(GROUPS.ids == 1, -base, base)
    distance = measures.distances(turned, base, GROUPS)
    assert distance[0] == pytest.approx(0)
    assert measures.furthest([distance], 2) == [(0, 1)]
    assert measures.furthest([np.array([3.0, 2.0, 1.0]), np.array([9.0, 1.0, 2.0])], 1) == [(0, 0), (1, 2)]


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0, 0, 0, 1, 1, 1], [0, 5]),
        ([0, 0, 1, 1, 1, 0], [2, 3]),
        ([0, 0, 0.75, 1, 1, 0.25], [1, 3]),
        ([0, 0, 0, 1, 1, 0.9], [0, 4]),
        ([np.nan] * 3 + [1, 1, 1], [6, 5]),
    ],
)
def test_prompts_are_sorted_by_accuracy(values, wanted):
    bins = measures.by_level(np.array(values, dtype=float), GROUPS, "accuracy", unit=True)
    assert bins.ids.tolist() == np.repeat(wanted, 3).tolist()
    assert len(bins.labels) > max(wanted)


def test_scores_that_are_no_accuracy_are_sorted_over_their_range():
    bins = measures.by_level(np.array([-3.0] * 3 + [5.0] * 3), GROUPS, "score", unit=False)
    assert (bins.labels[0], bins.labels[-1]) == ("-3", "5")
    assert bins.ids.tolist() == [0] * 3 + [5] * 3
    assert len(measures.by_level(np.ones(6), GROUPS, "score", unit=False).labels) == 1


def test_lengths_that_are_equal_are_in_one_bin():
    bins = measures.by_length(np.array([1.0] * 8 + [2.0, 3.0]), "tokens")
    assert bins.counts.sum() == 10
    assert len(set(bins.ids[:8].tolist())) == 1
    limit = measures.by_length(np.array([3.0, 9.0] + [16.0] * 8), "tokens")
    assert (limit.labels, limit.counts.tolist()) == (("3 to 9", "to 16"), [2, 8])
    assert measures.by_length(np.ones(4), "tokens").labels == ("1",)


def test_a_wide_table_is_cut_into_parts_that_fit():
    lines = [("name", *(f"reward {at}" for at in range(30))), ("grpo", *("0.123" for _ in range(30)))]
    parts = list(blocks(lines, 120))
    assert [cell for part in parts for cell in part[0][1:]] == list(lines[0][1:])
    assert all(len("  ".join(part[0])) <= 120 for part in parts)
    assert list(blocks([("a" * 200, "b" * 200), ("", "")], 120)) == [[("a" * 200, "b" * 200), ("", "")]]
