"""HA-DW's settings: their limits, and those that an anchor does not use."""

from __future__ import annotations

import pytest

from tests.facts import facts
from verl_ext.core.history import WeighByHistory
from verl_ext.core.typed import make
from verl_ext.errors import ConfigurationError
from verl_ext.estimators.hadw import HadwSettings

# The step, and the named estimator, which has its settings.
KINDS = pytest.mark.parametrize("kind", [WeighByHistory, HadwSettings])


@pytest.mark.parametrize(
    ("name", "low", "below", "high"),
    [
        ("lambda_scale", 1e-9, 0, 1e30),
        ("eta", 0, -1e-9, 1),
        ("eta_min", 0, -1e-9, 1),
        ("history_window", 1, 0, None),
        ("fixed_anchor", 0, -1e-9, 1),
    ],
)
def test_a_setting_may_reach_its_limits_and_not_pass_them(name, low, below, high):
    anchor = {"anchor": "fixed"} if name == "fixed_anchor" else {}
    for value in (low, high):
        assert value is None or getattr(make(WeighByHistory, anchor | {name: value}, "here"), name) == value
    for beyond in (below, None if high is None else high * (1 + 1e-9)):
        if beyond is not None:
            with pytest.raises(ConfigurationError, match=facts(f"here.{name}")):
                make(WeighByHistory, anchor | {name: beyond}, "here")


@KINDS
@pytest.mark.parametrize(
    ("given", "unused"),
    [
        ({}, ()),
        ({"history_window": 3, "eta": 0.5, "eta_min": 0.5}, ()),
        ({"anchor": "window", "history_window": 3}, ()),
        ({"anchor": "window", "eta": 0.5}, ("eta=0.5", "anchor=window", "anchor=soft")),
        ({"anchor": "window", "eta": 0.1}, ()),  # its default changes nothing
        ({"anchor": "fixed", "fixed_anchor": 0.5}, ()),
        (
            {"anchor": "fixed", "fixed_anchor": 0.5, "history_window": 3},
            ("history_window=3", "anchor=soft or anchor=window"),
        ),
        ({"fixed_anchor": 0.4}, ("fixed_anchor=0.4", "anchor=soft", "anchor=fixed")),
        ({"anchor": "window", "fixed_anchor": 0.0}, ("fixed_anchor=0.0", "anchor=window", "anchor=fixed")),
    ],
)
def test_a_setting_that_the_anchor_does_not_use_is_refused(kind, given, unused):
    if not unused:
        make(kind, given, "here")
        return
    with pytest.raises(ConfigurationError, match=facts(*unused)):
        make(kind, given, "here")
