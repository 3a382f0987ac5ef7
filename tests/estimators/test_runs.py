"""State and metrics over the steps of a run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import Rollout, rollouts
from tests.calls import metrics_of
from tests.estimators.every import EVERY, KEYS, components, run, started
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


@EVERY
def test_the_metrics_of_a_step(name, config):
    rollout = Rollout(list("aabb"), {"a": [1.0, 0, 1, 1], "b": [0.5, 0, 1, 1]}, [2] * 4, [1.0, 0, 1, 1])
    found = metrics_of(
        name, [0.0] * 4, rollout.uids, lengths=[2] * 4, config=config, components=components(rollout),
        state=started(config),
    )  # fmt: skip
    assert found["reward/a/mean"] == 0.75
    assert found["reward/a/dead_groups"] == found["reward/b/dead_groups"] == 0.5
    assert found["reward/b/unscored"] == 0
    assert {f"advantage/{stat}" for stat in ("mean", "std", "min", "max", "zero_share")} <= set(found)
    wanted = {
        "gdpo": {"whiten_shift", "whiten_std"},
        "dgpo": {"balance_z", "dead_share", "valid_groups"},
        "hadw": {"capability_prior", "capability_posterior", "eta_t", "reweighting_std"},
    }
    parts = {name, config.get("hadw", {}).get("base", name)}
    assert {f"{name}/{metric}" for part in parts for metric in wanted.get(part, ())} <= set(found)
    assert {metric.split("/")[0] for metric in found} <= {"reward", "advantage", name}


def test_the_metrics_of_a_list_bear_the_name_of_the_estimator():
    steps = ["weigh_and_sum", "centre", "whiten", "weigh_by_difficulty", "weigh_by_history"]
    found = metrics_of("compose", [1.0, 0, 1, 1], list("aabb"), config={"compose": {"steps": steps}})
    assert {metric.split("/")[0] for metric in found} == {"reward", "advantage", "compose"}
    assert {"compose/whiten_std", "compose/valid_groups", "compose/capability_prior"} <= set(found)
