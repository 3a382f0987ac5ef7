"""How a chain applies its steps, the state that it keeps between batches, and the states that it rejects."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from tests.facts import facts
from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain, Step, StepResult, plain_state
from verl_ext.core.post_sum import WeightByHistory
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


@dataclass(frozen=True)
class Returning(Step):
    """A custom step that returns whatever a function makes of its values."""

    name: ClassVar[str] = "returning"
    function: Callable[[np.ndarray], object]

    def apply(self, values, batch):
        return self.function(values)


CHAIN = Chain((WeightedSum(), Center(), Count(), WeightByHistory()))
STATE_OF_HISTORY = {"anchor": "soft", "value": 0.5, "window": [0.5], "updates": 1}


@pytest.mark.parametrize(
    "state", [{"count": 2}, {"count": 2, "weight_by_history": STATE_OF_HISTORY}], ids=["one step", "two steps"]
)
def test_a_state_of_the_same_steps_is_valid(state):
    CHAIN.check_state(state)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"count": 2, "whiten": 1}, ("'whiten'", "another estimator")),
        ({"center": 1}, ("'center'", "another estimator")),  # a step without a state
        (["count"], ("must map steps to states", "['count']")),
        ({}, ("must map steps to states", "{}")),
        ({"weight_by_history": {}}, ("weight_by_history", "damaged")),
    ],
    ids=str,
)
def test_a_state_with_which_a_step_cannot_continue_is_rejected(state, words):
    with pytest.raises(CheckpointError, match=facts(*words)):
        CHAIN.check_state(state)


def test_each_step_gets_the_state_that_it_returned():
    batch = Batch.of([[1], [0]], ["g", "g"], accuracy=[1, 0])

    first = CHAIN(batch)
    second = CHAIN(batch, first.state)

    assert first.state["count"] == 1
    assert second.state["count"] == 2
    assert second.state["weight_by_history"]["updates"] == 2
    assert {"rows", "reward/max", "capability_prior"} <= set(first.metrics)


def test_a_step_with_a_state_occurs_only_once():
    """The states are stored by the names of the steps."""
    with pytest.raises(ConfigurationError, match=facts("'count'", "more than once", "Remove all but one")):
        Chain((WeightedSum(), Count(), Center(), Count()))


def test_a_step_without_a_state_may_occur_twice():
    assert len(Chain((Center(), WeightedSum(), Center())).steps) == 3


@pytest.mark.parametrize(
    ("weights_of_chain", "weights_of_batch", "advantages"),
    [
        pytest.param(None, None, [0, 0], id="no weights"),  # the sums are 1 and 1
        pytest.param(None, [4.0, 0.0], [2, -2], id="weights of the batch"),  # 4 and 0
        pytest.param((1.0, 3.0), [4.0, 0.0], [-1, 1], id="weights of the chain"),  # 1 and 3
    ],
)
def test_the_weights_of_a_chain_replace_those_of_the_batch(weights_of_chain, weights_of_batch, advantages):
    batch = Batch.of([[1.0, 0.0], [0.0, 1.0]], ["g", "g"], keys=("a", "b"))
    weighted_batch = batch if weights_of_batch is None else batch.with_weights(weights_of_batch)
    chain = Chain((WeightedSum(), Center()), weights_of_chain)
    assert chain(weighted_batch).advantages.tolist() == advantages
    assert batch.reward_weights.tolist() == [1, 1]  # unchanged


def test_a_chain_has_one_weight_per_reward():
    batch = Batch.of([[1.0, 0.0]], ["g"], keys=("a", "b"))
    chain = Chain((WeightedSum(),), (1.0, 1.0, 1.0))
    with pytest.raises(ConfigurationError, match=facts("3 weights", "2 rewards 'a', 'b'", "one weight per reward")):
        chain(batch)


ORDER_WORDS = ("synthetic batches", "`before_sum`", "`after_center`", "`before_center`")
REMOVED_ATTRIBUTE = pytest.mark.parametrize(
    ("name", "words"),
    [
        ("weights", ("`batch.weights`",)),
        ("after", ORDER_WORDS),
        ("not_after", ORDER_WORDS),
        ("undoes", ORDER_WORDS),
    ],
    ids=["weights", "after", "not_after", "undoes"],
)


@REMOVED_ATTRIBUTE
def test_a_class_with_an_attribute_that_steps_do_not_have_is_rejected(name, words):
    with pytest.raises(ConfigurationError, match=facts("step Mine", repr(name), "no effect", "Remove it", *words)):
        type("Mine", (Step,), {"name": "mine", name: ()})


@REMOVED_ATTRIBUTE
def test_a_class_with_a_setting_that_steps_do_not_have_is_rejected(name, words):
    with pytest.raises(ConfigurationError, match=facts("step Mine", repr(name), "no effect", "Remove it", *words)):
        type("Mine", (Step,), {"name": "mine", "__annotations__": {name: "tuple"}})


def test_the_rewards_of_a_batch_are_read_only():
    def double_in_place(values):
        values *= 2
        return values

    batch = Batch.of([[4.0]], ["g"])
    with pytest.raises(ValueError, match="read-only"):
        Chain((Returning(double_in_place), WeightedSum()))(batch)


def test_the_array_of_the_caller_stays_writable():
    rewards = np.array([[4.0]])
    batch = Batch.of(rewards, ["g"])
    rewards *= 2
    assert batch.rewards.tolist() == [[4.0]]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        pytest.param(lambda values: values[:, 0], ("ndarray (2,)", "(2, 1)"), id="one dimension"),
        pytest.param(lambda values: values[:-1], ("ndarray (1, 1)", "(2, 1)"), id="fewer rows"),
        pytest.param(lambda values: values - values[:, 0], ("ndarray (2, 2)", "(2, 1)"), id="more columns"),
        pytest.param(lambda values: values.tolist(), ("list", "(2, 1)"), id="list"),
    ],
)
@pytest.mark.parametrize("later_steps", [(), (Center(),)], ids=["last step", "before center"])
def test_a_step_that_returns_a_wrong_shape_is_rejected(function, words, later_steps):
    chain = Chain((WeightedSum(), Returning(function), *later_steps))
    batch = Batch.of([[1], [2]], ["g", "g"])
    with pytest.raises(ConfigurationError, match=facts("step 'returning'", *words)):
        chain(batch)


def test_a_chain_must_end_with_one_value_per_trajectory():
    batch = Batch.of([[1, 2]], ["g"], keys=("a", "b"))
    with pytest.raises(ConfigurationError, match=facts("['center']", 2, "weighted_sum")):
        Chain((Center(),))(batch)


def test_a_chain_must_have_a_step():
    empty_chain = Chain(())
    assert empty_chain.per_reward
    with pytest.raises(ConfigurationError, match=facts("[]", "weighted_sum")):
        empty_chain(Batch.of([[1]], ["g"]))


@pytest.mark.parametrize(
    "state",
    [None, True, 10**30, np.float64(0.1), [[1], {"a": "\ud800"}], {"": {}}],
    ids=["None", "bool", "long integer", "float of numpy", "list", "empty dict"],
)
def test_a_state_that_json_restores_unchanged_is_valid(state):
    assert plain_state({"mine": state}) == {"mine": state}


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({"mean": [0.5, float("nan")]}, id="NaN"),
        pytest.param(float("-inf"), id="infinity"),
        pytest.param({"seen": {1}}, id="set"),
        pytest.param({"last": (1, 2)}, id="tuple"),
        pytest.param({"by_prompt": {"a": {3: 0.5}}}, id="key that is not a text"),
        pytest.param({"n": np.int64(3)}, id="integer of numpy"),
    ],
)
def test_a_state_that_json_does_not_restore_is_rejected(state):
    with pytest.raises(CheckpointError, match=facts("'mine'", "str, list, and dict")):
        plain_state({"mine": state})


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


def test_an_inherited_field_for_weights_is_rejected():
    class WithWeights:
        weights = None

    with pytest.raises(ConfigurationError, match=facts("'weights'", "batch.weights")):

        class Weigh(WithWeights, Step):
            name = "weigh"
