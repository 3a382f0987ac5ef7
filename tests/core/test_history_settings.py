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
