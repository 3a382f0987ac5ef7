"""A list of rewards per turn may contain numbers only."""

import numpy as np
import pytest

from tests.facts import facts
from verl_ext.core.turns import pad_entries
from verl_ext.errors import DataError


@pytest.mark.parametrize(("returned", "is_text"), [('["1.0"]', True), ('[0.5, "2"]', True), (["1.0"], False)])
def test_a_text_in_a_list_per_turn_is_rejected(returned: object, is_text: bool) -> None:
    turns = np.array([2])
    truncated = np.array([False])
    with pytest.raises(DataError, match=facts("'tool'", "'p'", "one number per turn")):
        pad_entries("tool", ["p"], [returned], turns, truncated, text=is_text)
