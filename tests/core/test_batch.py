"""The batch: shapes, ranges and finite numbers, weights of rewards and criteria, conditions, and the accuracy."""

import math

import numpy as np
import pytest

from tests.facts import facts
from verl_ext.core.batch import Batch, Condition, unit_accuracy
from verl_ext.core.groups import Groups
from verl_ext.core.turns import Turns
from verl_ext.errors import ConfigurationError, DataError

NAN, INF = math.nan, math.inf
LABELS = list("abcde")
XY = ("x", "y")


@pytest.mark.parametrize(
    ("rewards", "labels"),
    [
        pytest.param(np.zeros((2, 3)), list("aab"), id="transposed"),  # to reshape it would mix up the trajectories
        pytest.param([], ["a"], id="no rewards"),
        pytest.param(np.ones((2, 2)), [], id="no labels"),
    ],
)
def test_rewards_of_a_wrong_shape_are_rejected(rewards, labels):
    with pytest.raises(DataError, match=facts("rewards", f"({len(labels)}, 2)")):
        Batch.of(rewards, labels, keys=XY)


@pytest.mark.parametrize("name", ["lengths", "accuracy", "kl_reward", "outputs"])
def test_a_column_of_a_wrong_shape_is_rejected(name):
    two_entries = {name: np.ones(2)}
    with pytest.raises(DataError, match=facts(name, "(3,)")):
        Batch.of([[1.0], [1.0], [1.0]], ["a", "a", "b"], **two_entries)


@pytest.mark.parametrize("value", [INF, -INF, -1e160])
def test_an_infinite_or_huge_reward_is_rejected_with_its_uid(value):
    rewards = [[1e30, NAN], [1, 0], [1, value], [INF, 0]]
    with pytest.raises(DataError, match=facts("reward 'y'", "uid 'b'", value, "row 2", "2 such", "at most 1e+30")):
        Batch.of(rewards, ["a", "a", "b", "c"], keys=XY)


@pytest.mark.parametrize("value", [INF, -INF, NAN, 1.1e30])
def test_the_kl_term_must_be_finite_where_a_reward_is_scored(value):
    rewards = [[1.0, 2.0], [NAN, 0.0]]
    with pytest.raises(DataError, match=facts("KL", "uid 'b'", value, "row 1")):
        Batch.of(rewards, ["a", "b"], keys=XY, kl_reward=[0.0, value])


@pytest.mark.parametrize("value", [INF, -INF, NAN, 1.1e30])
def test_the_kl_term_of_a_response_without_scores_may_be_any_number(value):
    rewards = [[1.0, NAN], [NAN, NAN], [0, 0]]
    batch = Batch.of(rewards, list("aba"), keys=XY, kl_reward=[-1e30, value, 0])
    np.testing.assert_array_equal(batch.kl_reward, [-1e30, value, 0])


@pytest.mark.parametrize("threshold", [None, 0.5])
@pytest.mark.parametrize("wrong", [INF, -INF, 2e30])
def test_an_accuracy_that_is_not_finite_is_rejected_with_its_uid(wrong, threshold):
    accuracy = np.array([0.0, NAN, wrong])
    with pytest.raises(DataError, match=facts("'k'", "'c'", str(wrong))):
        unit_accuracy(accuracy, LABELS, key="k", threshold=threshold)


@pytest.mark.parametrize(
    ("low", "high"), [(-1.0, 1.0), (0.0, 2.0), (0.0, 1 + 2e-6), (-2e-6, 0.5)], ids=lambda value: f"{value:.6g}"
)
def test_an_accuracy_outside_the_unit_interval_is_rejected_with_a_remedy(low, high):
    found_range = f"[{low:g}, {high:g}]"
    remedies = ("algorithm.rewards.accuracy_key", "accuracy_threshold=t")
    with pytest.raises(ConfigurationError, match=facts("'reward'", found_range, "[0, 1]", *remedies)):
        unit_accuracy(np.array([low, high, NAN]), LABELS, key="reward", threshold=None)


@pytest.mark.parametrize(
    ("values", "clipped"),
    [
        ([-5e-7, 0.5], [0.0, 0.5]),
        ([0.5, 1 + 5e-7], [0.5, 1.0]),
        ([NAN, NAN], [NAN, NAN]),
    ],
    ids=["below 0", "above 1", "not scored"],
)
def test_an_accuracy_beyond_the_unit_interval_by_rounding_is_clipped(values, clipped):
    accuracy = unit_accuracy(np.array(values), LABELS, key="acc", threshold=None)
    np.testing.assert_array_equal(accuracy, clipped)


@pytest.mark.parametrize(("threshold", "margin"), [(0.0, 1e-6), (0.5, 1e-6), (100.0, 1e-4), (-100.0, 1e-4)])
def test_a_threshold_has_a_relative_margin_of_a_millionth(threshold, margin):
    """The margin exceeds float32 rounding. For example, float32(0.7) is 0.69999999 and has reached 0.7."""
    values = threshold + margin * np.array([-1.5, -0.5, 0.5, 1.5])
    accuracy = unit_accuracy(values, LABELS, key="k", threshold=threshold)
    condition_met = Condition("hard", at_least=threshold).met(values)
    assert accuracy.tolist() == [0, 0, 0, 1]
    assert condition_met.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "values", "found"),
    [
        ("accuracy", [0.5, -1e-9], "-1e-09"),
        ("accuracy", [NAN, 1.5], "1.5"),
        ("lengths", [1, -1], "-1"),
        ("lengths", [NAN, 1], "nan"),
        ("lengths", [2.0**53 + 2, 1], "9.0072e+15"),
        ("outputs", [-1, 1], "-1"),
    ],
)
def test_a_column_outside_its_range_is_rejected_with_the_value(name, values, found):
    highest = "1" if name == "accuracy" else "9.0072e+15"
    column = {name: values}
    with pytest.raises(DataError, match=facts(name, f"[0, {highest}]", f"found {found}")):
        Batch.of([[1.0], [0.0]], ["a", "a"], **column)


@pytest.mark.parametrize(("name", "highest"), [("accuracy", 1), ("lengths", 2.0**53), ("outputs", 2.0**53)])
def test_a_column_may_have_the_limits_of_its_range(name, highest):
    column = {name: [0, highest]}
    batch = Batch.of([[1.0], [0.0]], ["a", "a"], **column)
    assert getattr(batch, name).tolist() == [0, highest]


def test_the_weight_of_a_column_is_the_weight_of_its_reward():
    batch = Batch.of([[1.0, 2.0]], ["p"], keys=("a", "b"))
    weighted = batch.with_weights([0.5, -2.0])
    assert weighted.weights[0].tolist() == [0.5, -2]
    assert weighted.group_weights[0].tolist() == [0.5, -2]
    assert weighted.rubric_weights[0].tolist() == [1, 1]
    assert batch.weights[0].tolist() == [1, 1]  # unchanged


def rubric_batch(labels: list[str], factors: list[list[float]]) -> Batch:
    """Return a batch with the reward `correct` and a rubric of two criteria, whose weights are the factors."""
    return Batch.of(
        np.zeros((len(labels), 3)),
        labels,
        keys=("correct", "rubric[0]", "rubric[1]"),
        reward_of_column=("correct", "rubric", "rubric"),
        criterion_weights=np.array(factors),
    )


def test_criterion_weight_is_rubric_weight_times_weight_within_rubric():
    """The prompts have different weights, so that there is one row of weights per response, and one per group."""
    factors = [[1.0, 0.75, -0.25], [1.0, 0.5, 0.5], [1.0, 0.75, -0.25]]
    batch = rubric_batch(["p", "q", "p"], factors).with_weights([3.0, 2.0])
    weights_of_p = [3.0, 1.5, -0.5]
    weights_of_q = [3.0, 1.0, 1.0]
    assert batch.weights.tolist() == [weights_of_p, weights_of_q, weights_of_p]
    assert batch.group_weights.tolist() == [weights_of_p, weights_of_q]
    assert batch.rubric_weights.tolist() == factors
    assert batch.by_reward().weights[0].tolist() == [3, 2]


def test_weights_of_criteria_are_multiplied_by_the_weight_of_their_rubric():
    factors = [1.0, 0.75, -0.25]
    batch = rubric_batch(["p", "q"], [factors, factors]).with_weights([1.0, 2.0])
    weighted_factors = [1, 1.5, -0.5]  # the reward has weight 1, the two criteria have weight 2
    assert batch.weights.tolist() == [weighted_factors, weighted_factors]
    assert batch.group_weights.tolist() == [weighted_factors, weighted_factors]
    assert batch.rubric_weights.tolist() == [factors, factors]


@pytest.mark.parametrize("weights", [[], [1.0], [1.0, 2.0, 3.0]], ids=str)
@pytest.mark.parametrize(
    ("batch", "names"),
    [
        pytest.param(Batch.of([[1.0, 2.0]], ["p"], keys=("a", "b")), "'a', 'b'", id="two rewards"),
        pytest.param(rubric_batch(["p"], [[1.0, 1.0, 1.0]]), "'correct', 'rubric'", id="a reward and a rubric"),
    ],
)
def test_there_must_be_one_weight_per_reward(weights, batch, names):
    """A rubric is one reward, whatever the number of its criteria."""
    with pytest.raises(ConfigurationError, match=facts(f"{len(weights)} weights", f"2 rewards {names}")):
        batch.with_weights(weights)


def test_by_default_a_response_is_one_output():
    batch = Batch.of([[1.0], [1.0]], ["a", "a"])
    assert batch.outputs.tolist() == [1, 1]


@pytest.mark.parametrize(("easy", "hard"), [("easi", "hard"), ("easy", "hart")])
def test_a_condition_with_an_unknown_reward_is_rejected_with_the_nearest_name(easy, hard):
    conditions = {easy: Condition(hard, at_least=1.0)}
    with pytest.raises(ConfigurationError, match=facts("easy", "hard")):
        Batch.of([[0, 1]], ["a"], keys=("hard", "easy"), conditions=conditions)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompts", Groups.of("aab")),
        ("turns", Turns.of_counts([2, 1])),
        ("reward_of_column", ("score", "score")),
    ],
    ids=["prompts", "turns", "reward_of_column"],
)
def test_a_batch_rejects_arguments_of_another_length(name, value):
    argument = {name: value}
    with pytest.raises(DataError, match=facts(name)):
        Batch.of([[1.0], [0.0]], ["a", "a"], **argument)
