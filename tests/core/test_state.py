from __future__ import annotations

import json

import numpy as np
import pytest

from tests.facts import facts
from verl_ext.core.state import RunState, plain_state
from verl_ext.errors import CheckpointError
from verl_ext.integration.run import run_state, use_run_state

SOUND = {"hadw": {"weigh_by_history": {"anchor": "soft", "value": 0.5, "window": [0.5], "ticks": 1}}}


def test_a_state_goes_through_json_and_back():
    run = RunState(states={"gdpo": {}}, warned={"old"})  # an estimator without a state leaves nothing to save
    assert run.state_dict() == {}
    run.load_state_dict(SOUND)
    assert set(run.states) == {"hadw"}
    assert run.warned == set()
    assert json.loads(json.dumps(run.state_dict(), allow_nan=False)) == SOUND
    run.reset()
    assert run == RunState()


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
        RunState(states={"compose": {"mine": REFUSED[case]}}).state_dict()


def test_the_state_in_force_is_one_a_process_and_may_be_replaced_for_a_block():
    of_process = run_state()
    assert run_state() is of_process
    mine, inner = RunState(), RunState()
    with use_run_state(mine) as given:
        assert given is mine is run_state()
        with use_run_state(inner):
            assert run_state() is inner
        assert run_state() is mine
    assert run_state() is of_process
    with pytest.raises(KeyError), use_run_state(mine):
        raise KeyError
    assert run_state() is of_process
