"""Steps of the user's own in a list."""

from __future__ import annotations

import json
import sys
import textwrap

import numpy as np
import pytest

from tests.calls import call
from tests.estimators.test_compose import SUMMED, composed
from tests.facts import facts, says
from verl_ext import Batch, RunState, Settings, build
from verl_ext.errors import CheckpointError, ConfigurationError
from verl_ext.estimators.compose import try_out

OWN = """
    from dataclasses import dataclass
    from typing import ClassVar

    import numpy as np

    from verl_ext.core.chain import Update
    from verl_ext.core.chain import Step
    from verl_ext.core.typed import limited


    @dataclass(frozen=True)
    class Clip(Step):
        name: ClassVar[str] = "clip"
        limit: float = limited(1.0, above=0.0)

        def apply(self, values, batch):
            return np.clip(values, -self.limit, self.limit)


    @dataclass(frozen=True)
    class Least(Step):
        "The least reward in place of the weighted sum."
        name: ClassVar[str] = "least"
        stands_for: ClassVar[tuple[str, ...]] = ("weigh_and_sum",)

        def apply(self, values, batch):
            return values.min(axis=1, keepdims=True)


    @dataclass(frozen=True)
    class Slower(Step):
        "Divides by the number of batches so far."
        name: ClassVar[str] = "slower"

        def init(self):
            return {"batches": 0}

        def update(self, values, batch, state):
            seen = (state or self.init())["batches"] + 1
            return Update(values / seen, state={"batches": seen}, metrics={"batches": seen})


    class Pair(Slower):
        name = "pair"

        def update(self, values, batch, state):
            return Update(values, state={"last": (1, 2)})


    class Ready(Slower):
        name = "ready"

        def init(self):
            return {"seen": set()}

        def update(self, values, batch, state):
            return Update(values, state={})


    class ByLength(Slower):
        "Its state is in order on the made-up batch, which has more than four responses."
        name = "by_length"

        def update(self, values, batch, state):
            return Update(values, state={len(values) if len(values) == 4 else "more": 1})


    class Flat(Step):
        name = "flat"

        def apply(self, values, batch):
            return values[:, 0]


    made = Least()


    class Foreign:
        "Has all that a step needs, but is none."
        name = "foreign"

        def __init__(self, **settings):
            self.after = self.not_after = {}
            self.stands_for = ()

        def init(self):
            return None

        def update(self, values, batch, state):
            return Update(values)


    class Nameless(Step):
        def apply(self, values, batch):
            return values


    class Broken(Step):
        name = "broken"

        def apply(self, values, batch):
            return values / batch.unknown


    class Listed(Step):
        name = "listed"

        def apply(self, values, batch):
            return values.tolist()


    class Fewer(Step):
        name = "fewer"

        def apply(self, values, batch):
            return values[:-1]


    class Unready(Step):
        name = "unready"

        def init(self):
            raise OSError("no such table")


    class Unchecked(Step):
        name = "unchecked"

        @classmethod
        def check(cls, given):
            return given["limit"] > 0


    class Infinite(Step):
        name = "infinite"

        def apply(self, values, batch):
            return np.where(np.arange(len(values))[:, None] == 0, np.inf, values)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module `own_steps` of the user's."""
    (tmp_path / "own_steps.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_steps", None)


BATCH = Batch.of([[1.0, 3.0], [0.0, 1.0], [2.0, 0.0], [5.0, 0.0]], list("aabb"), keys=("x", "y"))
XY = {"rewards": {"keys": ["x", "y"]}}


def test_a_step_of_one_s_own_stands_in_a_list_with_its_settings(own):
    chain = composed(*SUMMED, {"step": "own_steps:Clip", "limit": 1}, **XY)
    # Totals 4 1 | 2 5, centred 1.5 -1.5 | -1.5 1.5.
    assert chain(BATCH).advantages.tolist() == [1.0, -1.0, -1.0, 1.0]
    with pytest.raises(ConfigurationError, match=facts("steps[2]", "own_steps:Clip", "limit", "above 0", "found 0")):
        composed(*SUMMED, {"step": "own_steps:Clip", "limit": 0})


def test_a_step_that_cannot_begin_is_named(own):
    with pytest.raises(ConfigurationError, match=facts("steps[2]", "own_steps:Unready", "OSError: no such table")):
        composed(*SUMMED, "own_steps:Unready")


def test_a_step_whose_check_raises_is_named_with_the_cause(own):
    with pytest.raises(
        ConfigurationError, match=facts("steps[2]", "own_steps:Unchecked", "KeyError: 'limit'")
    ) as caught:
        composed(*SUMMED, "own_steps:Unchecked")
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_misspelt_step_of_one_s_own_is_told_the_steps_of_its_module(own):
    with pytest.raises(ConfigurationError, match=facts("'Lest'", "did you mean 'Least'", "'Clip'")) as caught:
        composed("own_steps:Lest", "centre")
    assert "'made'" not in str(caught.value)
    assert "'Foreign'" not in str(caught.value)


@pytest.mark.parametrize("name", ["made", "Foreign", "Nameless"])
def test_only_a_named_class_that_inherits_step_is_a_step(own, name):
    with pytest.raises(ConfigurationError, match=facts(f"steps[2]: 'own_steps:{name}'", "verl_ext.Step")):
        composed(*SUMMED, f"own_steps:{name}")


def test_a_step_of_one_s_own_may_come_twice(own):
    chain = composed(*SUMMED, "own_steps:Clip", "balance", "own_steps:Clip", **XY)
    assert [step.name for step in chain.steps].count("clip") == 2


def test_a_step_of_one_s_own_may_stand_for_another(own):
    chain = composed("own_steps:Least", "centre", "scale_by_mad", "balance", **XY)
    # Least rewards 1 0 | 0 0.
    np.testing.assert_allclose(chain(BATCH).advantages, [2 * 0.5 / 1.0001 * 2, -2 * 0.5 / 1.0001 * 2, 0, 0])


def test_a_step_of_one_s_own_may_remember_something_that_is_saved_and_read(own):
    chain = composed(*SUMMED, "own_steps:Slower", **XY)
    first = chain(BATCH)
    second = chain(BATCH, first.state)
    np.testing.assert_array_equal(second.advantages, first.advantages / 2)
    assert second.metrics["slower/batches"] == 2
    run = RunState()
    run.states["compose"] = second.state
    saved = json.loads(json.dumps(run.state_dict()))
    with pytest.raises(CheckpointError, match=facts("'slower'", "known: 'weigh_by_history'")):
        RunState().load_state_dict(saved)
    resumed = RunState()
    resumed.readers |= chain.readers
    resumed.load_state_dict(saved)
    np.testing.assert_array_equal(chain(BATCH, resumed.states["compose"]).advantages, first.advantages / 3)


@pytest.mark.parametrize(
    ("step", "found"),
    [
        ("Flat", ("(own_steps:Flat)", "shape (12,)", "array")),
        ("Listed", ("(own_steps:Listed)", "list", "array", 12)),
        ("Fewer", ("(own_steps:Fewer)", "shape (11, 1)", "array", 12)),
        ("Broken", ("(own_steps:Broken)", "AttributeError: 'Batch' object has no attribute 'unknown'")),
        ("Infinite", ("(own_steps:Infinite)", "finite")),
        ("Pair", ("state['last']", "(1, 2)", "tuple")),
        ("Ready", ("state['seen']", "set()")),
    ],
)
def test_what_does_not_hold_is_found_on_a_made_up_batch(own, step, found):
    settings = Settings.parse({"compose": {"steps": [*SUMMED, f"own_steps:{step}"]}} | XY)
    complaint = try_out(build("compose", settings), settings)
    assert says(complaint, f"step '{step.lower()}'", *found)


def test_a_state_that_cannot_be_saved_is_refused_at_the_first_batch(own):
    steps = [*SUMMED, "own_steps:ByLength"]
    settings = Settings.parse({"compose": {"steps": steps}})
    assert try_out(build("compose", settings), settings) is None
    with pytest.raises(CheckpointError, match=facts("step 'by_length'", "key 4", "int")):
        call("compose", [1.0, 0.0, 1.0, 1.0], list("aabb"), config={"compose": {"steps": steps}})


def test_a_list_that_holds_passes_the_made_up_batch(own):
    """It has as many rewards as the list gets."""
    rewards = {"keys": ["x", "y"], "weights": [1.0, 2.0]}
    for steps in (["own_steps:Least", "centre"], [*SUMMED, "own_steps:Slower"], [*SUMMED, "weigh_by_difficulty"]):
        settings = Settings.parse({"compose": {"steps": steps}, "rewards": rewards})
        assert try_out(build("compose", settings), settings) is None
