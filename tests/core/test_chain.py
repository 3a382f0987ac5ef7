"""How a chain applies its steps, what it keeps between batches, and what it refuses to go on from."""

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
    """A step of the user's."""

    name: ClassVar[str] = "count"

    def init(self):
        return 0

    def transform(self, values, batch, state):
        return StepResult(values, state + 1, {"rows": 1.0, "reward/max": 3.0})


ALL = Chain((WeightedSum(), Center(), Count(), WeightByHistory()))
SEEN = {"anchor": "soft", "value": 0.5, "window": [0.5], "updates": 1}


def test_a_state_of_the_same_steps_passes():
    for state in ({"count": 2}, {"count": 2, "weight_by_history": SEEN}):
        ALL.check_state(state)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"count": 2, "whiten": 1}, ("'whiten'", "another estimator")),
        ({"center": 1}, ("'center'", "another estimator")),  # a step that remembers nothing
        (["count"], ("must map steps to states", "['count']")),
        ({}, ("must map steps to states", "{}")),
        ({"weight_by_history": {}}, ("weight_by_history", "damaged")),
    ],
)
def test_a_state_from_which_no_step_can_go_on_is_refused(state, words):
    with pytest.raises(CheckpointError, match=facts(*words)):
        ALL.check_state(state)


def test_each_step_gets_its_own_state_back():
    batch = Batch.of([[1], [0]], ["g", "g"], accuracy=[1, 0])
    first = ALL(batch)
    second = ALL(batch, first.state)
    assert [result.state["count"] for result in (first, second)] == [1, 2]
    assert second.state["weight_by_history"]["updates"] == 2
    assert {"rows", "reward/max", "capability_prior"} <= set(first.metrics)


def test_the_rewards_of_a_batch_are_read_only():
    mine = np.array([[4.0]])
    batch = Batch.of(mine, ["g"])

    @dataclass(frozen=True)
    class Doubles(Step):
        name: ClassVar[str] = "doubles"

        def apply(self, values, batch):
            values *= 2
            return values

    with pytest.raises(ValueError, match="read-only"):
        Chain((Doubles(), WeightedSum()))(batch)
    mine *= 2  # the caller's own array stays writable


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (lambda values: values[:, 0], ("ndarray (2,)", "(2, 1)")),
        (lambda values: values[:-1], ("ndarray (1, 1)", "(2, 1)")),
        (lambda values: values - values[:, 0], ("ndarray (2, 2)", "(2, 1)")),
        (lambda values: values.tolist(), ("list", "(2, 1)")),
    ],
)
def test_a_step_that_returns_another_shape_is_named(returned, shown):
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


KEPT = {"none": None, "flag": True, "big": 10**30, "number": np.float64(0.1), "list": [[1], {"a": "\ud800"}], "": {}}


def test_what_json_gives_back_as_it_was_may_be_a_state():
    assert plain_state({"mine": KEPT}) == {"mine": KEPT}


REFUSED = {
    "nan": {"mean": [0.5, float("nan")]},
    "infinity": float("-inf"),
    "set": {"seen": {1}},
    "tuple": {"last": (1, 2)},
    "key": {"by_prompt": {"a": {3: 0.5}}},
    "an integer of numpy": {"n": np.int64(3)},
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_that_json_would_refuse_or_change_is_an_error_that_names_the_step(case):
    with pytest.raises(CheckpointError, match=facts("'mine'", "str, list, and dict")):
        plain_state({"mine": REFUSED[case]})
