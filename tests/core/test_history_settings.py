"""HA-DW's settings: their limits, and those that an anchor does not use."""

from __future__ import annotations

import pytest

from tests.facts import facts
from verl_ext.core.history import WeighByHistory
from verl_ext.core.typed import make
from verl_ext.errors import ConfigurationError
from verl_ext.estimators.hadw import HadwSettings

EPSILON = 1e-9
# The step, and the named estimator, which has its settings.
KINDS = pytest.mark.parametrize("kind", [WeighByHistory, HadwSettings])


@KINDS
@pytest.mark.parametrize(
    ("name", "low", "valid", "high"),
    [
        ("lambda_scale", EPSILON, "above 0", 1e30),
        ("eta", 0, "at least 0", 1),
        ("eta_min", 0, "at least 0", 1),
        ("history_window", 1, "at least 1", None),
    ],
)
def test_a_setting_may_reach_its_limits_and_not_pass_them(kind, name, low, valid, high):
    assert getattr(make(kind, {name: low}, "here"), name) == low
    with pytest.raises(ConfigurationError, match=facts(f"here.{name}", valid)):
        make(kind, {name: low - 1 if name == "history_window" else low - EPSILON}, "here")
    if high is not None:
        assert getattr(make(kind, {name: high}, "here"), name) == high
        with pytest.raises(ConfigurationError, match=facts(f"here.{name}", f"at most {high:g}")):
            make(kind, {name: high * (1 + EPSILON)}, "here")


@KINDS
@pytest.mark.parametrize("value", [0, 1])
def test_a_fixed_anchor_may_be_any_accuracy(kind, value):
    assert make(kind, {"anchor": "fixed", "fixed_anchor": value}, "here").fixed_anchor == value
    for beyond, valid in ((-EPSILON, "at least 0"), (1 + EPSILON, "at most 1")):
        with pytest.raises(ConfigurationError, match=facts("here.fixed_anchor", valid)):
            make(kind, {"anchor": "fixed", "fixed_anchor": beyond}, "here")


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
        ({"anchor": "fixed", "fixed_anchor": 0.5, "history_window": 3}, ("history_window=3", "soft or anchor=window")),
        ({"fixed_anchor": 0.5}, ("fixed_anchor=0.5", "anchor=soft", "anchor=fixed")),
        ({"anchor": "window", "fixed_anchor": 0.0}, ("fixed_anchor=0.0", "anchor=window", "anchor=fixed")),
        ({"anchor": "fixed"}, ("anchor=fixed", "fixed_anchor", "[0, 1]")),
    ],
)
def test_a_setting_that_the_anchor_does_not_use_is_refused(kind, given, unused):
    if not unused:
        make(kind, given, "here")
        return
    with pytest.raises(ConfigurationError, match=facts(kind.where, *unused)):
        make(kind, given, "here")
