"""How a chain applies its steps, what it keeps between batches, and what it refuses to go on from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from tests.facts import facts
from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain, Step, Update
from verl_ext.core.history import Capability, WeighByHistory
from verl_ext.core.steps import Centre, WeighAndSum
from verl_ext.errors import CheckpointError, ConfigurationError


@dataclass(frozen=True)
class Count(Step):
    """A step of the user's whose state is plain data, with neither `read` nor `check_state`."""

    name: ClassVar[str] = "count"

    def init(self):
        return 0

    def update(self, values, batch, state):
        return Update(values, state + 1)


@dataclass(frozen=True)
class Forgetful(Count):
    """A step that returns no state after all."""

    name: ClassVar[str] = "forgetful"

    def update(self, values, batch, state):
        return Update(values)


ALL = Chain((WeighAndSum(), Centre(), Count(), WeighByHistory()))
SEEN = Capability("soft", 0.5, (0.5,), 1)


def test_a_chain_works_per_reward_if_it_does_not_begin_with_the_sum():
    assert Chain((Centre(), WeighAndSum())).per_reward
    assert not Chain((WeighAndSum(), Centre())).per_reward
    assert not Chain(()).per_reward


def test_only_steps_with_a_state_are_read():
    assert ALL.stateful
    assert not Chain((WeighAndSum(), Centre())).stateful
    assert set(ALL.readers) == {"count", "weigh_by_history"}
    assert ALL.readers["count"](3) == 3
    assert ALL.readers["weigh_by_history"](SEEN.to_dict()) == SEEN
    assert Chain((WeighAndSum(), Centre())).readers == {}


def test_a_state_of_the_same_steps_passes():
    ALL.check_state({})
    ALL.check_state({"count": 2})
    ALL.check_state({"count": 2, "weigh_by_history": SEEN})


def test_a_state_of_other_steps_is_refused():
    with pytest.raises(CheckpointError, match=facts("'whiten'", "weigh_and_sum, ")):
        ALL.check_state({"count": 2, "whiten": 1})
    with pytest.raises(CheckpointError, match="'centre'"):  # a step that remembers nothing
        ALL.check_state({"centre": 1})


def test_a_step_looks_at_its_own_state():
    with pytest.raises(CheckpointError, match=facts("anchor=window", "anchor=soft")):
        ALL.check_state({"count": 2, "weigh_by_history": Capability("window", 0.5, (0.5,), 1)})


def test_each_step_gets_its_own_state_back():
    batch = Batch.of([[1], [0]], ["g", "g"], accuracy=[1, 0])
    first = ALL(batch)
    second = ALL(batch, first.state)
    assert [result.state["count"] for result in (first, second)] == [1, 2]
    assert second.state["weigh_by_history"].ticks == 2


def test_a_step_without_a_new_state_leaves_none():
    result = Chain((WeighAndSum(), Forgetful()))(Batch.of([[1.0]], ["g"]))
    assert result.state == {}
    np.testing.assert_array_equal(result.advantages, [1.0])


@dataclass(frozen=True)
class Summary(Count):
    """A step whose name verl would read as a sum."""

    name: ClassVar[str] = "summary"

    def update(self, values, batch, state):
        return Update(values, state, {"rows": 1.0, "reward/max": 3.0})


def test_metrics_bear_the_name_of_the_step_or_of_the_estimator():
    """verl combines several updates by the words in a metric's name, so the step's name is written apart."""
    batch = Batch.of([[1.0]], ["g"])
    assert Chain((WeighAndSum(), Summary()))(batch).metrics == {"s_ummary/rows": 1.0, "s_ummary/reward/max": 3.0}
    named = Chain((WeighAndSum(), Summary()), {"summary": "mine"})
    assert named(batch).metrics == {"mine/rows": 1.0, "mine/reward/max": 3.0}


def test_chains_of_the_same_steps_are_equal_whatever_their_metrics_are_called():
    steps = (WeighAndSum(), Centre())
    assert Chain(steps, {"centre": "mine"}) == Chain(steps)
    assert Chain(steps[:1]) != Chain(steps)


def test_a_chain_must_end_with_one_value():
    batch = Batch.of([[1, 2]], ["g"], keys=("a", "b"))
    with pytest.raises(ConfigurationError, match=facts("['centre']", "shape (1, 2)", "weigh_and_sum")):
        Chain((Centre(),))(batch)


def test_a_chain_holds_a_step_with_a_state_once():
    with pytest.raises(ConfigurationError, match=facts("once", "['weigh_by_history', 'weigh_by_history']")):
        Chain((WeighAndSum(), WeighByHistory(), WeighByHistory("window")))


def test_a_chain_applies_its_steps_in_order():
    # Centre first: (1 - 2) * 2 = -2. Sum first gives the same here, so use the KL part: sum, then centre removes it.
    batch = Batch.of([[1], [3]], ["g"] * 2, kl_reward=np.array([5.0, 5.0]))
    assert Chain((Centre(), WeighAndSum((2.0,))))(batch).advantages.tolist() == [3, 7]  # -2 + 5, 2 + 5
    assert Chain((WeighAndSum((2.0,)), Centre()))(batch).advantages.tolist() == [-2, 2]


def test_what_is_not_scored_gets_no_advantage():
    batch = Batch.of([[1], [0], [np.nan]], ["g"] * 3)
    assert Chain((WeighAndSum(), Centre()))(batch).advantages.tolist() == [0.5, -0.5, 0]
