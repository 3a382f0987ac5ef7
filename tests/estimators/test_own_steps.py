"""Steps of the user's own in a list, and the trial of an estimator on a made-up batch."""

from __future__ import annotations

import json
import sys
import textwrap
from functools import partial

import numpy as np
import pytest

from tests.calls import call
from tests.estimators.test_compose import SUMMED, composed
from tests.facts import facts, says
from verl_ext import Batch, Settings, build
from verl_ext.core.chain import plain_state
from verl_ext.errors import CheckpointError, ConfigurationError
from verl_ext.integration.checks.trial import try_out

OWN = """
    from dataclasses import dataclass
    from typing import ClassVar

    import numpy as np

    from verl_ext import Step, Update, limited


    @dataclass(frozen=True)
    class Clip(Step):
        name: ClassVar[str] = "clip"
        limit: float = limited(1.0, above=0.0)

        def apply(self, values, batch):
            return np.clip(values, -self.limit, self.limit)


    class Slower(Step):
        "Divides by the number of batches so far."
        name = "slower"

        def init(self):
            return {"batches": 0}

        def update(self, values, batch, state):
            seen = state["batches"] + 1
            return Update(values / seen, state={"batches": seen}, metrics={"batches": seen})


    class Pair(Slower):
        name = "pair"

        def update(self, values, batch, state):
            return Update(values, state={"last": (1, 2)})


    class ByLength(Slower):
        "Its state is in order on the made-up batch, which has more than four responses."
        name = "by_length"

        def update(self, values, batch, state):
            return Update(values, state={len(values) if len(values) == 4 else "more": 1})


    class Least(Step):
        "Combines the rewards itself."
        name = "least"

        def apply(self, values, batch):
            return values.min(axis=1, keepdims=True)


    class Signs(Step):
        "The weights are lost in it: it does not use the sum."
        name = "signs"

        def apply(self, values, batch):
            return batch.rewards[:, :1] - 0.5


    class Flat(Step):
        name = "flat"

        def apply(self, values, batch):
            return values[:, 0]


    class Broken(Step):
        name = "broken"

        def apply(self, values, batch):
            return values / batch.unknown


    class Infinite(Step):
        name = "infinite"

        def apply(self, values, batch):
            return np.where(np.arange(len(values))[:, None] == 0, np.inf, values)


    class Nameless(Step):
        pass


    class Middle(Step):
        "Centres around the middle of a group's range."
        name = "middle"
        centres = True

        def apply(self, values, batch):
            rows = [values[batch.groups.ids == group] for group in batch.groups.ids]
            return values - np.array([(group.max(axis=0) + group.min(axis=0)) / 2 for group in rows])
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module `own_steps` of the user's, and one that raises."""
    (tmp_path / "own_steps.py").write_text(textwrap.dedent(OWN))
    (tmp_path / "raises_at_import.py").write_text('raise RuntimeError("on purpose")')
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_steps", None)


BATCH = Batch.of([[1.0, 3.0], [0.0, 1.0], [2.0, 0.0], [5.0, 0.0]], list("aabb"), keys=("x", "y"))
XY = {"rewards": {"keys": ["x", "y"]}}


def test_a_step_of_one_s_own_stands_in_a_list_with_its_settings(own):
    chain = composed(*SUMMED, {"step": "own_steps:Clip", "limit": 1}, "balance", "own_steps:Clip", **XY)
    # Totals 4 1 | 2 5, centred 1.5 -1.5 | -1.5 1.5.
    assert chain(BATCH).advantages.tolist() == [1.0, -1.0, -1.0, 1.0]


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ({"step": "own_steps:Clip", "limit": 0}, ("own_steps:Clip.limit", "above 0", "found 0")),
        ("raises_at_import:Step", ("'raises_at_import:Step'", "RuntimeError: on purpose")),
        ("own_steps:Nameless", ("'own_steps:Nameless'", "verl_ext.Step")),
    ],
)
def test_a_step_that_cannot_be_used_is_named_with_the_cause(own, step, told):
    with pytest.raises(ConfigurationError, match=facts("algorithm.compose.steps[2]", *told)):
        composed(*SUMMED, step)


def test_a_step_of_one_s_own_may_be_the_centring(own):
    chain = composed("weigh_and_sum", "own_steps:Middle", "scale_by_mad", "weigh_by_history", **XY)
    assert [step.name for step in chain.steps][1] == "middle"
    with pytest.raises(ConfigurationError, match=facts("divide_by_mean must not come after centre")):
        composed("weigh_and_sum", "own_steps:Middle", "divide_by_mean", **XY)


def test_a_step_of_one_s_own_may_remember_something_that_is_saved_and_read(own):
    chain = composed(*SUMMED, "own_steps:Slower", **XY)
    first = chain(BATCH)
    second = chain(BATCH, first.state)
    np.testing.assert_array_equal(second.advantages, first.advantages / 2)
    assert second.metrics["batches"] == 2
    saved = json.loads(json.dumps(plain_state(second.state)))
    chain.check_state(saved)
    np.testing.assert_array_equal(chain(BATCH, saved).advantages, first.advantages / 3)


def trial(*steps, **algorithm):
    settings = Settings.parse({"compose": {"steps": list(steps)}} | algorithm)
    return next(try_out(partial(build, "compose"), settings), None)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([*SUMMED, "own_steps:Flat"], ("step 'flat'", "ndarray (12,)", "(12, 1)")),
        ([*SUMMED, "own_steps:Broken"], ("AttributeError: 'Batch' object has no attribute 'unknown'", "own_steps.py")),
        ([*SUMMED, "own_steps:Infinite"], ("not finite",)),
        ([*SUMMED, "own_steps:Pair"], ("'pair'", "[1, 2]")),
        (["own_steps:Least", *SUMMED], ("'least'", "(12, 1)", "(12, 2)")),
        ([*SUMMED, "own_steps:Signs"], ("algorithm.rewards.weights", "no effect")),
    ],
)
def test_what_does_not_hold_is_found_on_a_made_up_batch(own, steps, told):
    assert says(trial(*steps, rewards=XY["rewards"] | {"weights": [1.0, 1.0]}), *told)


@pytest.mark.parametrize("weights", [None, [1.0, 2.0], [1.0, 0.0]])
def test_a_list_that_holds_passes_the_made_up_batch(own, weights):
    rewards = {"keys": ["x", "y"], "weights": weights}
    for steps in (
        [*SUMMED, "own_steps:Slower"],
        [*SUMMED, "weigh_by_difficulty", "weigh_by_history"],
        ["centre", "own_steps:Clip", "weigh_and_sum", "whiten"],
    ):
        assert trial(*steps, rewards=rewards) is None
    weighing = {"step": "weigh_by_variation", "lowest": [1.0, -3.0]}
    assert trial(weighing, *SUMMED, rewards=rewards) is None
    assert says(trial(weighing | {"lowest": [1.0]}, *SUMMED, rewards=rewards), "lowest", "2 numbers")
    assert trial(*SUMMED, "own_steps:Signs") is None  # one reward: no weights to lose


def test_what_rounding_leaves_after_a_step_that_centres_is_exactly_0(own):
    batch = Batch.of([[0.3], [np.float32(0.3)], [1.0], [0.0]], list("aabb"))
    for steps in (["weigh_and_sum", "own_steps:Middle"], ["own_steps:Middle", "scale_by_std", "weigh_and_sum"]):
        assert trial(*steps) is None
        assert (composed(*steps)(batch).advantages != 0).tolist() == [False, False, True, True]


def test_a_state_that_cannot_be_saved_is_refused_at_the_first_batch(own):
    steps = [*SUMMED, "own_steps:ByLength"]
    assert trial(*steps) is None
    with pytest.raises(CheckpointError, match=facts("'by_length'", "JSON")):
        call("compose", [1.0, 0.0, 1.0, 1.0], list("aabb"), config={"compose": {"steps": steps}})
