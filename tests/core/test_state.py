from __future__ import annotations

import numpy as np
import pytest

from tests.facts import facts
from verl_ext.core.chain import plain_state
from verl_ext.errors import CheckpointError

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
        plain_state({"mine": REFUSED[case]})
