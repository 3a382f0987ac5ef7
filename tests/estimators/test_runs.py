"""State and metrics over the steps of a run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import rollouts
from tests.estimators.every import KEYS, run
from verl_ext import RunState


@pytest.mark.parametrize("anchor", ["soft", "window"])
@given(batches=st.lists(rollouts(), min_size=2, max_size=5))
def test_a_run_goes_on_with_the_same_numbers_after_save_and_load(anchor, batches):
    config = KEYS | {"hadw": {"anchor": anchor, "history_window": 3}}
    run_on, cut = RunState(), len(batches) // 2
    for rollout in batches[:cut]:
        run("hadw", config, rollout, state=run_on)
    resumed = RunState()
    resumed.load_state_dict(json.loads(json.dumps(run_on.state_dict(), allow_nan=False)))
    for rollout in batches[cut:]:
        on = run("hadw", config, rollout, state=run_on)
        again = run("hadw", config, rollout, state=resumed)
        np.testing.assert_array_equal(on.rows, again.rows)
        assert run_on.state_dict() == resumed.state_dict()
