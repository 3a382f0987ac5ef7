"""State and metrics over the steps of a run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import rollouts
from tests.estimators.every import KEYS, run


@pytest.mark.parametrize("anchor", ["soft", "window"])
@given(batches=st.lists(rollouts(), min_size=2, max_size=5))
def test_a_run_goes_on_with_the_same_numbers_after_save_and_load(anchor, batches):
    config = KEYS | {"hadw": {"anchor": anchor, "history_window": 3}}
    cut, state = len(batches) // 2, None
    for rollout in batches[:cut]:
        state = run("hadw", config, rollout, state=state).state
    resumed = json.loads(json.dumps(state, allow_nan=False))
    for rollout in batches[cut:]:
        on, again = (run("hadw", config, rollout, state=before) for before in (state, resumed))
        np.testing.assert_array_equal(on.rows, again.rows)
        state, resumed = on.state, again.state
        assert state == resumed
