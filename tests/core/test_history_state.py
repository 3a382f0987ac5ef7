"""HA-DW's saved state: what is read, and what is refused as damaged."""

from __future__ import annotations

import math

import pytest

from tests.facts import facts
from verl_ext.core.history import Capability
from verl_ext.errors import CheckpointError

NAN = math.nan


SOUND = {"anchor": "soft", "value": 0.5, "window": [0.25, 0.5], "ticks": 2}


def test_a_sound_state_is_read():
    assert Capability.from_dict(SOUND) == Capability("soft", 0.5, (0.25, 0.5), 2)
    assert Capability.from_dict(SOUND | {"value": None, "window": [], "ticks": 0}) == Capability("soft")
    assert Capability.from_dict(SOUND).to_dict() == SOUND
    assert Capability.from_dict(SOUND | {"value": 1, "window": [0, 1]}).window == (0.0, 1.0)
    assert Capability.from_dict(SOUND | {"ticks": 2**53}).ticks == 2**53
    mean = SOUND | {"anchor": "window", "value": 0.375}  # not the last of the window
    assert Capability.from_dict(mean).value == 0.375
    fixed = SOUND | {"anchor": "fixed", "window": []}
    assert Capability.from_dict(fixed | {"ticks": 0}) == Capability("fixed", 0.5, (), 0)
    assert Capability.from_dict(fixed | {"ticks": 7}).ticks == 7


@pytest.mark.parametrize("missing", list(SOUND))
def test_a_state_without_an_entry_is_damaged(missing):
    with pytest.raises(CheckpointError, match=facts("anchor", "value", "window", "ticks", "found")):
        Capability.from_dict({key: value for key, value in SOUND.items() if key != missing})


@pytest.mark.parametrize(
    "wrong",
    [
        # Each but for one thing as it should be.
        {"anchor": "window", "value": 1.5},
        {"anchor": "window", "value": -0.1},
        {"anchor": "window", "value": NAN},
        {"anchor": "window", "value": "0.5"},
        {"value": True, "window": [0.25, True]},
        {"value": True, "window": [0.25, 1.0]},
        {"window": [2.0, 0.5]},
        {"window": ["0.25", 0.5]},
        {"window": [None, 0.5]},
        {"window": "0.5"},
        {"window": 0.5},
        {"window": None},
        {"ticks": 2.0},
        {"ticks": 2**53 + 1},
        {"ticks": 1},
        {"ticks": 0},
        {"value": None},
        {"window": []},
        {"window": [0.5, 0.25]},
        {"value": None, "window": []},
        {"value": None, "window": [], "ticks": 0, "anchor": "hard"},
        {"anchor": None},
        {"anchor": "window", "value": None},
        {"anchor": "fixed", "value": 0.5, "window": [], "ticks": -1},
        {"anchor": "fixed", "value": 0.5, "window": [], "ticks": True},
        {"anchor": "fixed", "value": 0.5, "window": [0.5], "ticks": 0},
    ],
)
def test_a_damaged_state_is_refused(wrong):
    with pytest.raises(CheckpointError, match="damaged"):
        Capability.from_dict(SOUND | wrong)


@pytest.mark.parametrize("data", [None, [], "soft", 3])
def test_a_state_that_is_no_mapping_is_refused(data):
    with pytest.raises(CheckpointError, match=facts("anchor", "value", "window", "ticks", "found")):
        Capability.from_dict(data)
