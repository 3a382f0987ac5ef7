"""Single steps by hand, and the errors of a step that gets values or a batch that it cannot use."""

import math

import pytest

from tests.core.single_reward import transformed, values_after
from tests.facts import facts
from verl_ext.core.batch import Batch
from verl_ext.core.cross_reward import DropConflicts
from verl_ext.core.post_sum import Balance, LengthPenalty, WeightByDifficulty, WeightByFocal, WeightByHistory
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


@pytest.mark.parametrize(
    ("step", "setting", "default"),
    [
        (ScaleByStd(), "epsilon", 0),
        (ScaleByMad(), "epsilon", 0),
        (DivideByMean(), "epsilon", 1e-6),
        (DivideByBatchStd(), "epsilon", 0),
        (Whiten(), "epsilon", 1e-6),
        (Whiten(), "over", "sequence"),
        (Balance(), "over", "token"),
        (WeightByDifficulty(), "dqw_temp", 2.0),
        (WeightByFocal(), "gamma", 1.0),
        (WeightByHistory(), "history_window", 10),
        (DropConflicts(), "tau", 0.2),
        (Center(), "leave_one_out", False),
        (Center(), "centers", True),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_default_is_the_default_of_the_specification(step, setting, default):
    assert getattr(step, setting) == default


@pytest.mark.parametrize(
    "step",
    [Balance(), Balance("sequence"), WeightByDifficulty(), Whiten(), LengthPenalty(weight=1.0), WeightByHistory()],
    ids=str,
)
def test_a_step_for_one_value_per_row_rejects_several(step):
    batch = Batch.of([[1, 2]], ["g"], keys=("a", "b"), accuracy=[1.0])
    with pytest.raises(ConfigurationError, match=facts("one value", "found 2", "weighted_sum")):
        step.transform(batch.rewards, batch, step.init())


@pytest.mark.parametrize("step", [WeightByDifficulty(), WeightByFocal(), WeightByHistory()], ids=str)
def test_a_step_that_needs_the_accuracy_rejects_a_batch_without_accuracy(step):
    with pytest.raises(ConfigurationError, match=facts(f"step '{step.name}'", "accuracy", "[0, 1]")):
        transformed(step, [1.0])


def test_a_field_of_the_batch_is_returned_by_its_name():
    batch = Batch.of([[1.0]], ["g"], fields={"data_source": ["math"]})
    assert batch.field("data_source") == ["math"]


def test_a_field_that_is_not_in_the_batch_is_an_error():
    batch = Batch.of([[1.0]], ["g"])
    with pytest.raises(ConfigurationError, match=facts("'data_source'", "needs_fields")):
        batch.field("data_source")


def test_canceling_rewards_still_cancel_after_division_by_the_batch_std():
    canceling_rewards = [[3.0, -0.5], [-3.0, 0.5], [0.0, 0.0]]
    batch = Batch.of(canceling_rewards, ["p"] * 3, keys=("a", "b"))

    divided = DivideByBatchStd().apply(batch.returns, batch)

    sums = divided.sum(axis=1)
    assert sums == pytest.approx([0, 0, 0], abs=1e-12)


def test_a_zero_variance_reward_is_not_divided_by_the_batch_std():
    values = values_after(DivideByBatchStd(), [1.0, 1.0, 1.0 + 1e-9])
    assert values == pytest.approx([1.0, 1.0, 1.0])


@pytest.mark.parametrize("first_turn", [4.0, math.nan], ids=["two scored turns", "one scored turn"])
def test_per_turn_the_std_of_the_batch_counts_each_response_once(first_turn):
    """One response has the values 4 and 4, or 4 alone, and the other has 0. The mean is 2, and the std 2 sqrt(2)."""
    turns = Turns.of_counts([2, 1])
    values = values_after(DivideByBatchStd(), [first_turn, 4.0, 0.0], turns=turns)
    assert values[1:] == pytest.approx([math.sqrt(2), 0], rel=1e-6)


@pytest.mark.parametrize(("gamma", "factor"), [(0.0, 1.0), (0.5, 0.5), (2.0, 0.0625)])
def test_the_focal_weight_has_an_exponent(gamma, factor):
    """The accuracy of the prompt is 0.75, so that the factor is 0.25^gamma."""
    values = values_after(WeightByFocal(gamma), [1.0, -2.0], accuracy=[1.0, 0.5])
    assert values.tolist() == [factor, -2 * factor]
