"""How a chain applies its steps, the state that it keeps between batches, and the states that it rejects."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from tests.facts import facts
from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain, Step, StepResult, plain_state
from verl_ext.core.history import WeightByHistory
from verl_ext.core.steps import Center, WeightedSum
from verl_ext.errors import CheckpointError, ConfigurationError


@dataclass(frozen=True)
class Count(Step):
    """A custom step that counts the batches."""

    name: ClassVar[str] = "count"

    def init(self):
        return 0

    def transform(self, values, batch, state):
        return StepResult(values, state + 1, {"rows": 1.0, "reward/max": 3.0})


ALL = Chain((WeightedSum(), Center(), Count(), WeightByHistory()))
SEEN = {"anchor": "soft", "value": 0.5, "window": [0.5], "updates": 1}


def test_a_state_of_the_same_steps_is_valid():
    for state in ({"count": 2}, {"count": 2, "weight_by_history": SEEN}):
        ALL.check_state(state)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"count": 2, "whiten": 1}, ("'whiten'", "another estimator")),
        ({"center": 1}, ("'center'", "another estimator")),  # a step without a state
        (["count"], ("must map steps to states", "['count']")),
        ({}, ("must map steps to states", "{}")),
        ({"weight_by_history": {}}, ("weight_by_history", "damaged")),
    ],
)
def test_a_state_with_which_a_step_cannot_continue_is_rejected(state, words):
    with pytest.raises(CheckpointError, match=facts(*words)):
        ALL.check_state(state)


def test_each_step_gets_the_state_that_it_returned():
    batch = Batch.of([[1], [0]], ["g", "g"], accuracy=[1, 0])
    first = ALL(batch)
    second = ALL(batch, first.state)
    assert [result.state["count"] for result in (first, second)] == [1, 2]
    assert second.state["weight_by_history"]["updates"] == 2
    assert {"rows", "reward/max", "capability_prior"} <= set(first.metrics)


def test_a_step_with_a_state_occurs_only_once():
    """The states are stored by the names of the steps."""
    with pytest.raises(ConfigurationError, match=facts("'count'", "more than once", "Remove all but one")):
        Chain((WeightedSum(), Count(), Center(), Count()))
    assert len(Chain((Center(), WeightedSum(), Center())).steps) == 3


def test_the_weights_of_a_chain_replace_those_of_the_batch():
    """Without weights, a chain keeps the weights of the batch."""
    batch = Batch.of([[1.0, 0.0], [0.0, 1.0]], ["g", "g"], keys=("a", "b"))
    steps = (WeightedSum(), Center())
    weighted_batch = batch.with_weights([4.0, 0.0])
    assert Chain(steps)(batch).advantages.tolist() == [0, 0]
    assert Chain(steps)(weighted_batch).advantages.tolist() == [2, -2]
    assert Chain(steps, (1.0, 3.0))(weighted_batch).advantages.tolist() == [-1, 1]
    assert batch.reward_weights.tolist() == [1, 1]
    with pytest.raises(ConfigurationError, match=facts("3 weights", "2 rewards 'a', 'b'", "one weight per reward")):
        Chain(steps, (1.0, 1.0, 1.0))(batch)


def test_the_rewards_of_a_batch_are_read_only():
    callers_array = np.array([[4.0]])
    batch = Batch.of(callers_array, ["g"])

    @dataclass(frozen=True)
    class Doubles(Step):
        name: ClassVar[str] = "doubles"

        def apply(self, values, batch):
            values *= 2
            return values

    with pytest.raises(ValueError, match="read-only"):
        Chain((Doubles(), WeightedSum()))(batch)
    callers_array *= 2  # stays writable


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (lambda values: values[:, 0], ("ndarray (2,)", "(2, 1)")),
        (lambda values: values[:-1], ("ndarray (1, 1)", "(2, 1)")),
        (lambda values: values - values[:, 0], ("ndarray (2, 2)", "(2, 1)")),
        (lambda values: values.tolist(), ("list", "(2, 1)")),
    ],
)
def test_a_step_that_returns_a_wrong_shape_is_rejected(returned, shown):
    @dataclass(frozen=True)
    class Odd(Step):
        name: ClassVar[str] = "odd"

        def apply(self, values, batch):
            return returned(values)

    for steps in ((WeightedSum(), Odd()), (WeightedSum(), Odd(), Center())):
        with pytest.raises(ConfigurationError, match=facts("step 'odd'", *shown)):
            Chain(steps)(Batch.of([[1], [2]], ["g"] * 2))


def test_a_chain_must_end_with_one_value():
    batch = Batch.of([[1, 2]], ["g"], keys=("a", "b"))
    with pytest.raises(ConfigurationError, match=facts("['center']", 2, "weighted_sum")):
        Chain((Center(),))(batch)
    with pytest.raises(ConfigurationError, match=facts("[]", "weighted_sum")):
        Chain(())(Batch.of([[1]], ["g"]))
    assert Chain(()).per_reward


VALID = {"none": None, "flag": True, "big": 10**30, "number": np.float64(0.1), "list": [[1], {"a": "\ud800"}], "": {}}


def test_a_state_that_json_restores_unchanged_is_valid():
    assert plain_state({"mine": VALID}) == {"mine": VALID}


INVALID = {
    "nan": {"mean": [0.5, float("nan")]},
    "infinity": float("-inf"),
    "set": {"seen": {1}},
    "tuple": {"last": (1, 2)},
    "key": {"by_prompt": {"a": {3: 0.5}}},
    "an integer of numpy": {"n": np.int64(3)},
}


@pytest.mark.parametrize("case", INVALID)
def test_a_state_that_json_rejects_or_changes_is_an_error_that_names_the_step(case):
    with pytest.raises(CheckpointError, match=facts("'mine'", "str, list, and dict")):
        plain_state({"mine": INVALID[case]})


def test_an_attribute_of_step_cannot_be_a_setting():
    """Without ClassVar, `compares` would be the first setting, and the limit of `Clip(0.5)` would not arrive."""
    with pytest.raises(ConfigurationError, match=facts("'compares'", "ClassVar")):

        @dataclass(frozen=True)
        class Clip(Step):
            name = "clip"
            compares: bool = True
            limit: float = 1.0


def test_a_step_with_a_state_must_return_its_state():
    class Forgetful(Step):
        name = "forgetful"

        def init(self):
            return {"batches": 0}

        def apply(self, values, batch):
            return values

    with pytest.raises(ConfigurationError, match=facts("'forgetful'", "state")):
        Chain((WeightedSum(), Forgetful()))(Batch.of([[1.0]], ["a"]))
