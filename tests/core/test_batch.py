from __future__ import annotations

import math

import numpy as np
import pytest

from tests.facts import facts, says
from verl_ext.core.batch import Batch, unit_accuracy
from verl_ext.errors import ConfigurationError, DataError

NAN, INF = math.nan, math.inf
LABELS = list("abcde")


@pytest.mark.parametrize(
    ("rewards", "labels"),
    [
        (np.zeros((2, 3)), "aab"),  # components in rows: reshaping it would give rewards to other trajectories
        (np.zeros((3, 3)), "aab"),
        (np.zeros(6), "aab"),
        ([[1.0, 2.0], [3.0], [4.0, 5.0]], "aab"),
        ([["good", "bad"]] * 3, "aab"),
        ([[None, {}]] * 3, "aab"),
        ([], "a"),
        (np.ones((2, 2)), ""),
    ],
)
def test_rewards_of_another_shape_are_refused(rewards, labels):
    with pytest.raises(DataError, match=facts("rewards", f"({len(labels)}, 2)", "'x', 'y'")):
        Batch.of(rewards, labels, keys=("x", "y"))


def test_a_flat_list_of_one_reward_is_told_its_key_both_shapes_and_how_to_write_it():
    with pytest.raises(DataError, match=facts("(3,)", "(3, 1)", "'score'", "rewards=[[value], ...]")):
        Batch.of([1.0, 0.0, 1.0], ["a", "a", "b"])


@pytest.mark.parametrize(("rewards", "keys"), [(np.zeros(2), ("x", "y")), (np.zeros((3, 1)), ("x",))])
def test_brackets_are_proposed_only_where_they_would_help(rewards, keys):
    with pytest.raises(DataError) as caught:
        Batch.of(rewards, ["a", "b"], keys=keys)
    assert "[[" not in str(caught.value)


def test_rewards_of_no_trajectory_need_no_second_axis():
    assert Batch.of([], [], keys=("x", "y")).rewards.shape == (0, 2)


@pytest.mark.parametrize(
    ("row", "found"), [([3.0], "(1,)"), (3.0, "()"), (["good", 1.0], "['good', 1.0]"), (["x" * 999], "...")]
)
def test_the_first_row_of_another_shape_is_named(row, found):
    with pytest.raises(DataError, match=facts("rewards", "row 1", found, "(3, 2)", "'x', 'y'")) as caught:
        Batch.of([[1.0, 2.0], row, [None, {}]], ["a", "a", "b"], keys=("x", "y"))
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("rewards", [{"a": 1.0}, {1.0}, iter([1.0])])
def test_what_is_no_list_is_named_by_its_type(rewards):
    with pytest.raises(DataError, match=facts("rewards", type(rewards).__name__)):
        Batch.of(rewards, ["a"])


@pytest.mark.parametrize("name", ["lengths", "accuracy", "kl_reward"])
@pytest.mark.parametrize("values", [np.ones(2), np.ones((3, 1)), ["a", "b", "c"]])
def test_a_column_of_another_shape_is_refused(name, values):
    with pytest.raises(DataError, match=facts(name, "(3,)")):
        Batch.of([[1.0]] * 3, ["a", "a", "b"], **{name: values})


@pytest.mark.parametrize("value", [INF, -INF])
def test_an_infinite_reward_is_named_with_its_uid(value):
    with pytest.raises(DataError, match=facts("reward 'y'", "uid 'b'", value, "row 2", "2 such")):
        Batch.of([[1, NAN], [1, 0], [1, value], [INF, 0]], ["a", "a", "b", "c"], keys=("x", "y"))


def test_a_reward_whose_square_is_far_too_large_is_named_too():
    Batch.of([[1e30]], ["a"])
    with pytest.raises(DataError, match=facts("'score'", "uid 'b'", "-1e+160", "1 such", "at most 1e+30")):
        Batch.of([[1e30], [-1e160]], ["a", "b"])


@pytest.mark.parametrize("value", [INF, -INF, NAN, 1.1e30])
def test_a_kl_part_that_is_not_finite_or_too_large_is_refused(value):
    with pytest.raises(DataError, match=facts("KL", "uid 'b'", value, "row 1")):
        Batch.of([[1.0], [0.0]], ["a", "b"], kl_reward=np.array([0.0, value]))


def test_a_kl_part_may_be_nan_where_nothing_is_scored():
    batch = Batch.of([[1.0, NAN], [NAN, NAN]], ["a", "b"], keys=("x", "y"), kl_reward=np.array([-1e30, NAN]))
    np.testing.assert_array_equal(batch.kl_reward, [-1e30, NAN])


def test_a_kl_part_is_needed_where_one_component_of_several_is_scored():
    with pytest.raises(DataError, match=facts("KL", "uid 'b'", NAN)):
        Batch.of([[1, 2, 3], [NAN, 2, NAN]], ["a", "b"], keys=("x", "y", "z"), kl_reward=np.array([0.0, NAN]))


def test_an_empty_batch_is_a_batch():
    batch = Batch.of([], [], keys=("x", "y"))
    assert batch.rewards.shape == (0, 2)
    assert batch.lengths.shape == (0,)


def test_lengths_are_one_where_not_given():
    assert Batch.of([[1.0], [2.0]], ["a", "b"]).lengths.tolist() == [1, 1]


def test_a_threshold_makes_an_accuracy_of_any_score():
    values = np.array([-1.0, 0.0, 0.5, 1.0, NAN])
    above = {threshold: unit_accuracy(values, LABELS, key="k", threshold=threshold) for threshold in (0.0, 0.5)}
    np.testing.assert_array_equal(above[0.0], [0, 0, 1, 1, NAN])  # strictly above
    np.testing.assert_array_equal(above[0.5], [0, 0, 0, 1, NAN])


@pytest.mark.parametrize("threshold", [None, 0.5])
@pytest.mark.parametrize("wrong", [INF, -INF, 2e30])
def test_an_accuracy_that_is_not_finite_is_named_with_its_uid(wrong, threshold):
    with pytest.raises(DataError, match=facts("'k'", "'c'", str(wrong))):
        unit_accuracy(np.array([0.0, NAN, wrong]), LABELS, key="k", threshold=threshold)


@pytest.mark.parametrize("values", [[-1.0, 1.0], [0.0, 2.0], [0.0, 1 + 2e-6], [-2e-6, 0.5]])
def test_accuracy_outside_the_unit_interval_names_key_range_and_remedy(values):
    with pytest.raises(ConfigurationError) as error:
        unit_accuracy(np.array([*values, NAN]), LABELS, key="reward", threshold=None, where="algorithm.rewards")
    assert says(
        error.value,
        "'reward'",
        f"[{min(values):g}, {max(values):g}]",
        "[0, 1]",
        "algorithm.rewards.accuracy_key",
        "algorithm.rewards.accuracy_threshold=t",
    )


@pytest.mark.parametrize(
    ("values", "cut"),
    [
        ([-5e-7, 0.5], [0.0, 0.5]),
        ([0.5, 1 + 5e-7], [0.5, 1.0]),
        ([-1e-6, 1 + 1e-6], [0.0, 1.0]),
        ([], []),
        ([NAN, -5e-7], [NAN, 0.0]),
        ([NAN, NAN], [NAN, NAN]),
    ],
)
def test_each_end_of_the_unit_interval_is_cut_off_by_itself(values, cut):
    np.testing.assert_array_equal(unit_accuracy(np.array(values), LABELS, key="acc", threshold=None), cut)


def test_an_accuracy_within_its_interval_is_not_copied():
    values = np.array([0.0, 0.5, 1.0])
    assert unit_accuracy(values, LABELS, key="acc", threshold=None) is values


@pytest.mark.parametrize(
    ("name", "values", "found"),
    [
        ("accuracy", [0.5, -1e-9], "-1e-09"),
        ("accuracy", [NAN, 1.5], "1.5"),
        ("accuracy", [INF, 0.0], "inf"),
        ("lengths", [1, -1], "-1"),
        ("lengths", [NAN, 1], "nan"),
        ("lengths", [INF, 1], "inf"),
        ("lengths", [2.0**53 + 2, 1], "9.0072e+15"),
    ],
)
def test_a_column_outside_its_range_is_refused_with_the_value(name, values, found):
    valid = {"accuracy": "[0, 1]", "lengths": "[0, 9.0072e+15]"}[name]
    with pytest.raises(DataError, match=facts(name, valid, f"found {found}")):
        Batch.of([[1.0], [0.0]], ["a", "a"], **{name: values})


def test_the_ends_of_the_ranges_are_within_them():
    batch = Batch.of([[1.0], [0.0]], ["a", "a"], accuracy=[0.0, 1.0], lengths=[0, 2.0**53])
    assert batch.lengths.tolist() == [0.0, 2.0**53]
    empty = Batch.of(np.empty((0, 1)), [], accuracy=[], lengths=[])
    assert len(empty.accuracy) == len(empty.lengths) == 0
