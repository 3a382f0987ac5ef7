"""Steps by hand or against plain loops, and the errors of a step that is given what it cannot use."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.batches import rollouts
from tests.core.columns import apply, column
from tests.facts import facts
from verl_ext.core.batch import Batch
from verl_ext.core.history import WeighByHistory
from verl_ext.core.steps import (
    Centre,
    Condition,
    DivideByBatchStd,
    DivideByMean,
    DropConflicts,
    PenaliseLength,
    Requirement,
    ScaleByMad,
    ScaleByStd,
    WeighAndSum,
)
from verl_ext.core.totals import Balance, WeighByDifficulty, WeighByFocal, Whiten
from verl_ext.core.typed import make
from verl_ext.errors import ConfigurationError

NAN = math.nan


def test_centre_leaves_the_mean_out():
    # Mean of the scored [1, 4] is 2.5; the group "b" of one is 0.
    found = apply(Centre(), [1.0, NAN, 4.0, 7.0], ["a", "a", "a", "b"])
    np.testing.assert_array_equal(found, [-1.5, NAN, 1.5, 0])


@pytest.mark.parametrize("epsilon", [1e-6, 5e-324])
@pytest.mark.parametrize("kind", [ScaleByStd, ScaleByMad, Whiten])
@pytest.mark.filterwarnings("error")
def test_zeros_stay_zero_whatever_epsilon(kind, epsilon):
    assert (apply(kind(epsilon=epsilon), [0.0, 0.0, 0.0]) == 0).all()
    assert (apply(Whiten("token"), [0.0, 0.0, 0.0]) == 0).all()


def test_defaults_are_those_of_the_specification():
    assert (ScaleByStd().epsilon, ScaleByMad().epsilon, Whiten().epsilon) == (1e-6, 1e-4, 1e-6)
    assert (Whiten().over, Balance().over, WeighByDifficulty().dqw_temp) == ("sequence", "token", 2.0)
    assert (DivideByMean().epsilon, DivideByBatchStd().epsilon, WeighByFocal().gamma) == (1e-6, 1e-6, 1.0)
    assert (PenaliseLength(2, 1).factor, DropConflicts().tau, Centre().leave_one_out) == (1.0, 0.2, False)
    assert Centre.centres


def test_weigh_and_sum_skips_what_is_not_scored():
    batch = Batch.of([[1, 10], [NAN, 10], [NAN, NAN]], ["g"] * 3, keys=("a", "b"))
    found = WeighAndSum((2.0, 0.5)).apply(batch.rewards, batch)
    np.testing.assert_array_equal(found, [[7], [5], [NAN]])  # 2 * 1 + 0.5 * 10; 0.5 * 10
    np.testing.assert_array_equal(WeighAndSum().apply(batch.rewards, batch), [[11], [10], [NAN]])


def test_the_kl_part_is_added_to_the_sum():
    batch = Batch.of([[1, 10], [NAN, NAN]], ["g"] * 2, keys=("a", "b"), kl_reward=np.array([-0.25, -0.5]))
    np.testing.assert_array_equal(WeighAndSum((2.0, 1.0)).apply(batch.rewards, batch), [[11.75], [NAN]])


def test_the_kl_part_may_be_left_out_of_groups_that_do_not_vary():
    batch = Batch.of([[1], [1], [2], [3]], list("aabb"), kl_reward=np.array([-0.5, 0.5, -0.25, 0.25]))
    found = WeighAndSum(kl_where_varying=True).apply(batch.rewards, batch)
    assert found.tolist() == [[1], [1], [1.75], [3.25]]


def test_a_wrong_number_of_weights_names_the_keys():
    batch = Batch.of([[1, 2]], ["g"], keys=("speed", "style"))
    with pytest.raises(ConfigurationError, match=facts("3 weights", "2 values", "2 reward keys", "'speed', 'style'")):
        WeighAndSum((1.0, 2.0, 3.0)).apply(batch.rewards, batch)


def test_condition_lets_an_easy_reward_count_where_the_hard_one_was_reached():
    batch = Batch.of([[1, 1.0], [2, 0.5], [3, 0.4], [4, NAN], [NAN, 0.4]], ["g"] * 5, keys=("easy", "hard"))
    step = Condition({"easy": Requirement("hard", 0.5)})
    found = step.update(batch.rewards, batch, None).values
    np.testing.assert_array_equal(found[:, 0], [1, 2, 0, NAN, NAN])  # at_least: 0.5 is enough
    np.testing.assert_array_equal(found[:, 1], batch.rewards[:, 1])


@pytest.mark.parametrize("conditions", [{"x": Requirement("a", 1)}, {"a": Requirement("x", 1)}])
def test_a_condition_on_an_unknown_reward_lists_the_keys(conditions):
    batch = Batch.of([[1, 2]], ["g"], keys=("a", "b"))
    with pytest.raises(ConfigurationError, match=facts("conditions", "'x'", "'a', 'b'")):
        Condition(conditions).update(batch.rewards, batch, None)


@pytest.mark.parametrize("step", [Balance("token"), Balance("sequence"), WeighByDifficulty(), Whiten()])
def test_a_step_for_one_value_refuses_several(step):
    batch = Batch.of([[1, 2]], ["g"], keys=("a", "b"), accuracy=[1.0])
    with pytest.raises(ConfigurationError, match=facts("one value", "found 2", "weigh_and_sum")):
        step.update(batch.rewards, batch, None)


@pytest.mark.parametrize("step", [WeighByDifficulty(), WeighByHistory()])
def test_a_step_without_the_accuracy_it_needs_says_so(step):
    with pytest.raises(ConfigurationError, match=facts(f"step '{step.name}'", "accuracy", "[0, 1]")):
        step.update(*column([1.0]), step.init())


@pytest.mark.parametrize(
    ("kind", "name", "least"),
    [
        *((kind, "epsilon", 1e-9) for kind in (DivideByMean, DivideByBatchStd, ScaleByStd, ScaleByMad, Whiten)),
        (WeighByDifficulty, "dqw_temp", 1e-6),
    ],
)
def test_a_divisor_is_above_zero(kind, name, least):
    assert getattr(make(kind, {name: least}, "here"), name) == least
    for wrong in (0, -least):
        with pytest.raises(ConfigurationError, match=facts(f"here.{name}", f"found {wrong:g}")):
            make(kind, {name: wrong}, "here")


def test_how_often_a_condition_was_met_is_logged():
    """Of the scored ones; the name is safe for verl's aggregation."""
    batch = Batch.of([[1, 1.0], [2, 0.5], [3, 0.4], [4, NAN]], ["g"] * 4, keys=("max_length", "hard"))
    update = Condition({"max_length": Requirement("hard", 0.5)}).update(batch.rewards, batch, None)
    assert update.metrics == {"condition_met/_x6d_ax_length": 2 / 3}
    unscored = Batch.of([[1, NAN]], ["g"], keys=("a", "b"))
    assert Condition({"a": Requirement("b", 1)}).update(unscored.rewards, unscored, None).metrics == {}


LENGTHS = [0, 6, 7, 8, 9, 10, 99]
PENALTIES = [0, 0, -0.25, -0.5, -0.75, -1, -1]


def test_the_penalty_grows_over_the_buffer_on_the_named_reward():
    batch = Batch.of([[1.0, 2.0]] * 7, ["g"] * 7, keys=("a", "b"), response_lengths=LENGTHS)
    update = PenaliseLength(10, 4, reward="b").update(batch.rewards, batch, None)
    wanted = batch.rewards.copy()
    wanted[:, 1] += PENALTIES
    np.testing.assert_allclose(update.values, wanted)
    assert update.metrics == {"too_long_share": 5 / 7, "length_penalty": pytest.approx(-3.5 / 7)}


def test_the_buffer_may_be_the_whole_length_and_an_empty_batch_has_no_penalty():
    batch = Batch.of([], [], response_lengths=[])
    found = PenaliseLength(4, 4).update(batch.rewards, batch, None).metrics
    assert found == {"too_long_share": 0, "length_penalty": 0}
    assert make(PenaliseLength, {"max_length": 1, "buffer": 1, "factor": 1e-9}, "here") == PenaliseLength(
        1, 1, None, 1e-9
    )
    for wrong in ({"max_length": 0, "buffer": 1}, {"max_length": 1, "buffer": 0}):
        with pytest.raises(ConfigurationError, match=facts("at least 1", "found 0")):
            make(PenaliseLength, wrong, "here")


def test_the_penalty_on_the_sum_has_a_factor_and_an_unscored_response_stays_unscored():
    batch = Batch.of([[NAN], *[[1.0]] * 6], ["g"] * 7, keys=("a",), response_lengths=LENGTHS)
    found = PenaliseLength(10, 4, factor=2.0).update(batch.rewards, batch, None).values[:, 0]
    np.testing.assert_allclose(found, [NAN, 1, 0.5, 0, -0.5, -1, -1])


@pytest.mark.parametrize(
    ("step", "given", "columns", "told"),
    [
        (PenaliseLength(10, 4), {}, 1, ("'penalise_length'", "length of each response")),
        (PenaliseLength(10, 4), {"response_lengths": [1, 1]}, 2, ("one value per trajectory", "found 2")),
        (PenaliseLength(10, 4, reward="c"), {"response_lengths": [1, 1]}, 2, ("'c'", "'a', 'b'")),
        (PenaliseLength(10, 4, reward="b"), {"response_lengths": [1, 1]}, 1, ("'b'", "before", "weigh_and_sum")),
        (WeighByFocal(), {}, 1, ("'weigh_by_focal'", "accuracy")),
    ],
)
def test_what_a_step_lacks_is_named(step, given, columns, told):
    batch = Batch.of([[1, 1], [0, 0]], ["g", "g"], keys=("a", "b"), **given)
    with pytest.raises(ConfigurationError, match=facts(*told)):
        step.update(batch.rewards[:, :columns], batch, None)


def test_a_field_that_is_not_known_is_an_error():
    with pytest.raises(ConfigurationError, match=facts("'data_source'")):
        Batch.of([[1.0]], ["g"]).field("data_source")
    assert Batch.of([[1.0]], ["g"], fields=lambda name: [name]).fields("x") == ["x"]


@given(rollouts(), st.sampled_from([1, 3, 5]), st.sampled_from([0.0, 0.5, 2.0]))
def test_each_is_the_plain_loop(rollout, buffer, number):
    (a, b), uids, lengths = rollout.columns.values(), rollout.uids, rollout.lengths
    batch = Batch.of(rollout.rewards, uids, keys=("a", "b"), accuracy=rollout.accuracy, response_lengths=lengths)
    left, std = reference.left_one_out, reference.over_batch_std
    pairs = [
        (Centre(leave_one_out=True), [left(a, uids), left(b, uids)]),
        (DivideByBatchStd(number + 1e-6), [std(a, number + 1e-6), std(b, number + 1e-6)]),
        (PenaliseLength(7, buffer, "a", number + 1), [reference.penalised(a, lengths, 7, buffer, number + 1), b]),
        (WeighByFocal(number), [reference.focal(a, uids, rollout.accuracy, number)]),
    ]
    for step, wanted in pairs:
        found = step.update(batch.rewards[:, : len(wanted)], batch, None).values
        np.testing.assert_allclose(found, np.transpose(wanted), rtol=1e-9, atol=1e-9)
