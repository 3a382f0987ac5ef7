"""The penalty for length by hand; it, leaving one out, the batch's std and focal weights against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.batches import rollouts
from tests.core.columns import apply
from tests.facts import facts
from verl_ext.core.batch import Batch
from verl_ext.core.steps import Centre, DivideByBatchStd, DivideByMean, PenaliseLength
from verl_ext.core.totals import WeighByFocal
from verl_ext.core.typed import make
from verl_ext.errors import ConfigurationError

NAN = math.nan
LENGTHS = [0, 6, 7, 8, 9, 10, 99]
PENALTIES = [0, 0, -0.25, -0.5, -0.75, -1, -1]


@pytest.mark.parametrize(("reward", "column"), [("a", 0), ("b", 1)])
def test_the_penalty_grows_over_the_buffer_on_the_named_reward(reward, column):
    batch = Batch.of([[1.0, 2.0]] * 7, ["g"] * 7, keys=("a", "b"), response_lengths=LENGTHS)
    update = PenaliseLength(10, 4, reward=reward).update(batch.rewards, batch, None)
    wanted = batch.rewards.copy()
    wanted[:, column] += PENALTIES
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


@given(rollouts(keys=("a",)), st.sampled_from([1, 3, 5]), st.sampled_from([0.0, 0.5, 2.0]))
def test_each_is_the_plain_loop(rollout, buffer, number):
    values, uids, lengths = rollout.columns["a"], rollout.uids, rollout.lengths
    batch = Batch.of(rollout.rewards, uids, keys=("a",), accuracy=rollout.accuracy, response_lengths=lengths)
    pairs = [
        (Centre(leave_one_out=True), reference.left_one_out(values, uids)),
        (DivideByBatchStd(number + 1e-6), reference.over_batch_std(values, number + 1e-6)),
        (WeighByFocal(number), reference.focal(values, uids, rollout.accuracy, number)),
        (PenaliseLength(7, buffer, "a", number + 1), reference.penalised(values, lengths, 7, buffer, number + 1)),
    ]
    for step, wanted in pairs:
        np.testing.assert_allclose(step.update(batch.rewards, batch, None).values[:, 0], wanted, rtol=1e-9, atol=1e-9)


def test_divide_by_batch_std_takes_each_reward_alone():
    # std of 0 and 2: sqrt(2); of 1, 4 and 7: 3; a value that is not scored stays so
    batch = Batch.of([[0.0, 1.0], [2.0, 4.0], [NAN, 7.0]], ["a", "a", "b"], keys=("a", "b"))
    found = DivideByBatchStd(1e-9).apply(batch.rewards, batch)
    np.testing.assert_allclose(found, [[0, 1 / 3], [np.sqrt(2), 4 / 3], [NAN, 7 / 3]], rtol=1e-6)


def test_divide_by_mean_leaves_what_is_not_scored():
    found = apply(DivideByMean(0.5), [1.0, NAN, 4.0, 7.0], ["a", "a", "a", "b"])
    np.testing.assert_allclose(found, [1 / 3, NAN, 4 / 3, 0])  # "b" is alone: it does not vary
