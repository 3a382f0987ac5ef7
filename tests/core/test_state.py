from __future__ import annotations

import json

import pytest

from verl_ext.core.history import Capability
from verl_ext.core.state import RunState
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
    run.remarked.add("kept")
    with pytest.raises(CheckpointError):
        run.load_state_dict(data)
    assert run.state_dict() == SOUND
    assert run.remarked == {"kept"}


def test_loading_replaces_what_was_there():
    run = RunState(states={"other": {"weigh_by_history": Capability("fixed", 0.3)}}, remarked={"old"})
    run.load_state_dict(SOUND)
    assert set(run.states) == {"hadw"}
    assert run.remarked == set()


def test_reset_forgets_states_and_remarks():
    run = RunState(remarked={"old"})
    run.load_state_dict(SOUND)
    run.remarked.add("new")
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
    assert repr(RunState()) == "RunState(states={}, remarked=set())"
    with pytest.raises(TypeError, match="readers"):
        RunState(readers={})
