from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.facts import says
from verl_ext.core.history import Capability
from verl_ext.core.state import RunState, plain_state
from verl_ext.errors import CheckpointError
from verl_ext.run import run_state, use_run_state

SOUND = {"hadw": {"weigh_by_history": {"anchor": "soft", "value": 0.5, "window": [0.5], "ticks": 1}}}


def test_a_state_goes_through_json_and_back():
    run = RunState()
    run.load_state_dict(SOUND)
    assert run.states["hadw"]["weigh_by_history"] == Capability("soft", 0.5, (0.5,), 1)
    assert json.loads(json.dumps(run.state_dict(), allow_nan=False)) == SOUND


def test_estimators_without_a_state_leave_nothing_to_save():
    assert RunState(states={"gdpo": {}}).state_dict() == {}


@pytest.mark.parametrize(
    "data",
    [
        {"hadw": None},
        {"hadw": ["weigh_by_history"]},
        {"hadw": {"another_step": {}}},
        {"hadw": {"weigh_by_history": {"anchor": "soft"}}},
        {"hadw": {"weigh_by_history": None}},
        SOUND | {"other": {"weigh_by_history": SOUND["hadw"]["weigh_by_history"] | {"value": 7}}},
    ],
)
def test_an_unsound_state_is_refused_and_nothing_changes(data):
    run = RunState()
    run.load_state_dict(SOUND)
    run.warned.add("kept")
    with pytest.raises(CheckpointError):
        run.load_state_dict(data)
    assert run.state_dict() == SOUND
    assert run.warned == {"kept"}


KEPT = {"none": None, "flag": True, "big": 10**30, "number": np.float64(0.1), "list": [[1], {"a": "\ud800"}], "": {}}


def test_what_json_gives_back_as_it_was_may_be_a_state():
    assert json.loads(json.dumps(plain_state({"mine": KEPT}), allow_nan=False)) == {"mine": KEPT}


def circle():
    inside = {}
    inside["self"] = [inside]
    return inside


REFUSED = {
    "nan": ({"mean": [0.5, float("nan")]}, ("state['mean'][1]", "nan")),
    "infinity": (np.float64("-inf"), ("state", "-inf")),
    "set": ({"seen": {1}}, ("state['seen']", "{1}", "set")),
    "tuple": ({"last": (1, 2)}, ("state['last']", "(1, 2)", "tuple")),
    "key": ({"by_prompt": {"a": {3: 0.5}}}, ("state['by_prompt']['a']", "key 3", "int")),
    "array": ([np.zeros(1)], ("state[0]", "array([0.])", "ndarray")),
    "an integer of numpy": ({"n": np.int64(3)}, ("state['n']", 3, "int64")),
    "object": (object(), ("state", "<object object at")),
    "of to_dict": (SimpleNamespace(to_dict=lambda: {"last": (1,)}), ("state['last']", "(1,)", "tuple")),
    "circle": (circle(), ("nested",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_that_json_would_refuse_or_change_is_an_error_that_names_the_step(case):
    state, found = REFUSED[case]
    with pytest.raises(CheckpointError) as caught:
        RunState(states={"compose": {"mine": state}}).state_dict()
    assert says(caught.value, *found)
    assert says(caught.value, "'mine'", "JSON", "None", "bool", "int", "float", "str", "list", "dict")


def test_loading_replaces_what_was_there():
    run = RunState(states={"other": {"weigh_by_history": Capability("fixed", 0.3)}}, warned={"old"})
    run.load_state_dict(SOUND)
    assert set(run.states) == {"hadw"}
    assert run.warned == set()


def test_reset_forgets_states_and_warnings():
    run = RunState(warned={"old"})
    run.load_state_dict(SOUND)
    run.warned.add("new")
    run.reset()
    assert run == RunState()


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


def test_how_states_are_read_is_no_part_of_a_state():
    assert repr(RunState()) == "RunState(states={}, warned=set())"
    with pytest.raises(TypeError, match="readers"):
        RunState(readers={})
