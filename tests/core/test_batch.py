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


@pytest.mark.parametrize(
    ("rewards", "labels"),
    [
        (np.zeros((2, 3)), "aab"),  # components in rows: reshaping it would give rewards to other trajectories
        ([], "a"),
        (np.ones((2, 2)), ""),
    ],
)
def test_rewards_of_a_wrong_shape_are_rejected(rewards, labels):
    with pytest.raises(DataError, match=facts("rewards", f"({len(labels)}, 2)")):
        Batch.of(rewards, labels, keys=("x", "y"))


@pytest.mark.parametrize("name", ["lengths", "accuracy", "kl_reward", "outputs"])
def test_a_column_of_a_wrong_shape_is_rejected(name):
    with pytest.raises(DataError, match=facts(name, "(3,)")):
        Batch.of([[1.0]] * 3, ["a", "a", "b"], **{name: np.ones(2)}).lengths  # noqa: B018


@pytest.mark.parametrize("value", [INF, -INF, -1e160])
def test_an_infinite_or_huge_reward_is_rejected_with_its_uid(value):
    with pytest.raises(DataError, match=facts("reward 'y'", "uid 'b'", value, "row 2", "2 such", "at most 1e+30")):
        Batch.of([[1e30, NAN], [1, 0], [1, value], [INF, 0]], ["a", "a", "b", "c"], keys=("x", "y"))


@pytest.mark.parametrize("value", [INF, -INF, NAN, 1.1e30])
def test_the_kl_term_must_be_finite_where_a_component_is_scored(value):
    keys, nothing = ("x", "y"), [NAN, NAN]
    batch = Batch.of([[1.0, NAN], nothing, [0, 0]], list("aba"), keys=keys, kl_reward=np.array([-1e30, value, 0]))
    np.testing.assert_array_equal(batch.kl_reward, [-1e30, value, 0])
    with pytest.raises(DataError, match=facts("KL", "uid 'b'", value, "row 1")):
        Batch.of([[1.0, 2.0], [NAN, 0.0]], ["a", "b"], keys=keys, kl_reward=np.array([0.0, value]))


@pytest.mark.parametrize("threshold", [None, 0.5])
@pytest.mark.parametrize("wrong", [INF, -INF, 2e30])
def test_an_accuracy_that_is_not_finite_is_rejected_with_its_uid(wrong, threshold):
    with pytest.raises(DataError, match=facts("'k'", "'c'", str(wrong))):
        unit_accuracy(np.array([0.0, NAN, wrong]), LABELS, key="k", threshold=threshold)


@pytest.mark.parametrize("values", [[-1.0, 1.0], [0.0, 2.0], [0.0, 1 + 2e-6], [-2e-6, 0.5]])
def test_an_accuracy_outside_the_unit_interval_is_rejected_with_its_key_its_range_and_the_remedy(values):
    words = (
        "'reward'",
        f"[{min(values):g}, {max(values):g}]",
        "[0, 1]",
        "algorithm.rewards.accuracy_key",
        "accuracy_threshold=t",
    )
    with pytest.raises(ConfigurationError, match=facts(*words)):
        unit_accuracy(np.array([*values, NAN]), LABELS, key="reward", threshold=None)


@pytest.mark.parametrize(
    ("values", "cut"),
    [
        ([-5e-7, 0.5], [0.0, 0.5]),
        ([0.5, 1 + 5e-7], [0.5, 1.0]),
        ([NAN, NAN], [NAN, NAN]),
    ],
)
def test_an_accuracy_beyond_the_unit_interval_by_rounding_is_clipped(values, cut):
    np.testing.assert_array_equal(unit_accuracy(np.array(values), LABELS, key="acc", threshold=None), cut)


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
    high = {"accuracy": 1, "lengths": 2.0**53, "outputs": 2.0**53}[name]
    Batch.of([[1.0], [0.0]], ["a", "a"], **{name: [0, high]})
    with pytest.raises(DataError, match=facts(name, f"[0, {high:g}]", f"found {found}")):
        Batch.of([[1.0], [0.0]], ["a", "a"], **{name: values}).lengths  # noqa: B018


def test_the_weight_of_a_column_is_that_of_its_component():
    batch = Batch.of([[1.0, 2.0]], ["p"], keys=("a", "b"))
    assert batch.weights[0].tolist() == [1, 1]
    weighted = batch.with_weights([0.5, -2.0])
    assert weighted.weights[0].tolist() == [0.5, -2]
    assert weighted.group_weights[0].tolist() == [0.5, -2]
    assert weighted.rubric_weights[0].tolist() == [1, 1]
    assert batch.weights[0].tolist() == [1, 1]  # unchanged


RUBRIC_KEYS = {"keys": ("right", "rubric[0]", "rubric[1]"), "reward_of_column": ("right", "rubric", "rubric")}


def test_the_weight_of_a_criterion_is_that_of_its_rubric_times_its_weight_within_the_rubric():
    """The second prompt has other weights, so that there is one row of weights per response, and one per group."""
    factors = np.array([[1.0, 0.75, -0.25], [1.0, 0.5, 0.5], [1.0, 0.75, -0.25]])
    batch = Batch.of(np.zeros((3, 3)), ["p", "q", "p"], **RUBRIC_KEYS, criterion_weights=factors).with_weights(
        [3.0, 2.0]
    )
    of_p, of_q = [3.0, 1.5, -0.5], [3.0, 1.0, 1.0]
    assert batch.weights.tolist() == [of_p, of_q, of_p]
    assert batch.group_weights.tolist() == [of_p, of_q]
    assert batch.rubric_weights.tolist() == factors.tolist()
    assert batch.by_reward().weights[0].tolist() == [3, 2]


def test_criteria_with_the_same_weights_for_every_prompt_have_one_row_of_weights():
    factors = np.array([[1.0, 0.75, -0.25]] * 2)
    batch = Batch.of(np.zeros((2, 3)), ["p", "q"], **RUBRIC_KEYS, criterion_weights=factors).with_weights([1.0, 2.0])
    for weights in (batch.weights, batch.group_weights):
        assert weights[0].tolist() == [1, 1.5, -0.5]
    assert batch.rubric_weights[0].tolist() == [1, 0.75, -0.25]


@pytest.mark.parametrize("weights", [[], [1.0], [1.0, 2.0, 3.0]])
def test_there_must_be_one_weight_per_reward(weights):
    """A rubric is one reward, whatever the number of its criteria."""
    plain = Batch.of([[1.0, 2.0]], ["p"], keys=("a", "b"))
    rubric = Batch.of([[1.0, 2.0, 3.0]], ["p"], **RUBRIC_KEYS, criterion_weights=np.ones((1, 3)))
    for batch, names in ((plain, "'a', 'b'"), (rubric, "'right', 'rubric'")):
        with pytest.raises(ConfigurationError, match=facts(f"{len(weights)} weights", f"2 rewards {names}")):
            batch.with_weights(weights)


def test_by_default_a_response_is_one_output():
    assert Batch.of([[1.0]] * 2, ["a", "a"]).outputs.tolist() == [1, 1]


@pytest.mark.parametrize(("key", "on"), [("easi", "hard"), ("easy", "hart")])
def test_a_condition_with_an_unknown_reward_is_rejected_with_the_nearest_name(key, on):
    with pytest.raises(ConfigurationError, match=facts("easy", "hard")):
        Batch.of([[0, 1]], "a", keys=("hard", "easy"), conditions={key: Condition(on, 1.0)})


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompts": Groups.of("aab")},
        {"turns": Turns.of_counts([2, 1])},
        {"reward_of_column": ("score", "score")},
    ],
)
def test_a_batch_rejects_arguments_of_another_length(arguments):
    (name,) = arguments
    with pytest.raises(DataError, match=facts(name)):
        Batch.of([[1.0], [0.0]], ["a", "a"], **arguments)
