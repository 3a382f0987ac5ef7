"""Steps by hand or against plain loops, and the errors of a step that is given what it cannot use."""

import math

import numpy as np
import pytest

from tests.core.columns import apply, column
from tests.facts import facts
from verl_ext.core.batch import Batch
from verl_ext.core.cross_reward import DropConflicts
from verl_ext.core.history import WeightByHistory
from verl_ext.core.post_sum import Balance, LengthPenalty, WeightByDifficulty, WeightByFocal
from verl_ext.core.steps import (
    Center,
    DivideByBatchStd,
    DivideByMean,
    ScaleByMad,
    ScaleByStd,
    Whiten,
)
from verl_ext.core.turns import Turns
from verl_ext.errors import ConfigurationError


def test_defaults_are_those_of_the_specification():
    assert (ScaleByStd().epsilon, ScaleByMad().epsilon, Whiten().epsilon) == (0, 0, 1e-6)
    assert (Whiten().over, Balance().over, WeightByDifficulty().dqw_temp) == ("sequence", "token", 2.0)
    assert (DivideByMean().epsilon, DivideByBatchStd().epsilon, WeightByFocal().gamma) == (1e-6, 0, 1.0)
    assert (DropConflicts().tau, Center().leave_one_out, WeightByHistory().history_window) == (0.2, False, 10)
    assert Center.centers


@pytest.mark.parametrize(
    "step",
    [Balance(), Balance("sequence"), WeightByDifficulty(), Whiten(), LengthPenalty(weight=1.0), WeightByHistory()],
)
def test_a_step_for_one_value_per_row_rejects_several(step):
    batch = Batch.of([[1, 2]], ["g"], keys=("a", "b"), accuracy=[1.0])
    with pytest.raises(ConfigurationError, match=facts("one value", "found 2", "weighted_sum")):
        step.transform(batch.rewards, batch, step.init())


@pytest.mark.parametrize("step", [WeightByDifficulty(), WeightByFocal(), WeightByHistory()])
def test_a_step_that_needs_the_accuracy_rejects_a_batch_without_accuracy(step):
    with pytest.raises(ConfigurationError, match=facts(f"step '{step.name}'", "accuracy", "[0, 1]")):
        step.transform(*column([1.0]), step.init())


def test_a_field_that_is_not_in_the_batch_is_an_error():
    with pytest.raises(ConfigurationError, match=facts("'data_source'", "needs_fields")):
        Batch.of([[1.0]], ["g"]).field("data_source")
    assert Batch.of([[1.0]], ["g"], fields={"data_source": ["math"]}).field("data_source") == ["math"]


def test_rewards_of_different_scale_still_cancel_after_the_division_by_the_std_of_the_batch():
    values = np.array([[3.0, -0.5, 1.0], [-3.0, 0.5, 1.0], [0.0, 0.0, 1.0 + 1e-9]])
    batch = Batch.of(values, ["p"] * 3, keys=("a", "b", "c"))
    found = DivideByBatchStd().transform(batch.returns, batch, None).values
    assert np.abs(found[:, 0] + found[:, 1]).max() < 1e-12
    assert found[:, 2] == pytest.approx(1.0)  # it does not vary


@pytest.mark.parametrize("first", [4.0, math.nan])
def test_per_turn_the_std_of_the_batch_counts_each_response_once(first):
    """The values 4 and 4 of one response, or 4 alone, 0 of another: mean 2, std 2 sqrt(2), as without turns."""
    batch = Batch.of([[first], [4.0], [0.0]], ["p"] * 3, turns=Turns.of_counts([2, 1]))
    found = DivideByBatchStd().transform(batch.returns, batch, None).values[1:, 0]
    assert found == pytest.approx([math.sqrt(2), 0], rel=1e-6)


@pytest.mark.parametrize(("gamma", "factor"), [(0.0, 1.0), (0.5, 0.5), (2.0, 0.0625)])
def test_the_focal_weight_has_an_exponent(gamma, factor):
    assert apply(WeightByFocal(gamma), [1.0, -2.0], accuracy=[1.0, 0.5]).tolist() == [factor, -2 * factor]
