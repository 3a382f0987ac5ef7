"""The default trainer with real workers and a table in place of the model; see `pipeline`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.pipeline import Pipeline, answers_to
from tests.integration.trainers import default_runs
from tests.integration.trainers.default_runs import ACC, HADW
from tests.integration.trainers.drawn import CASES, Drawn, batches, check


def test_a_reward_and_a_step_read_what_the_agent_loop_wrote(pipeline: Pipeline) -> None:
    """Accuracy [1000 | 1110 | 0000] plus twice the drafts [1201 | 2220 | 0001], centred."""
    steps = "+algorithm.compose.steps=[weigh_and_sum,tests.integration.own_steps:AddToolRewards,centre]"
    keys = "+algorithm.rewards.keys=[acc,drafts]"
    (update,) = pipeline.run("several", "algorithm.adv_estimator=compose", keys, steps).updates
    rows = [[0.75, 1.75, -2.25, -0.25], [1.25, 1.25, 1.25, -3.75], [-0.5, -0.5, -0.5, 1.5]]
    assert update.by_answer() == pytest.approx(answers_to("several", *rows))


def test_an_asynchronous_step_of_two_updates_is_two_ticks(pipeline: Pipeline) -> None:
    result = pipeline.run("history", *HADW, ACC, "+trainer.v1.sync={parameter_sync_step: 2}", prompts=4)
    assert len(result.updates) == 2
    assert result.trainer._verl_ext.state["weigh_by_history"]["ticks"] == 2


@settings(max_examples=3)
@given(case=st.sampled_from(sorted(CASES)), run=st.lists(batches(sessions=True), min_size=2, max_size=2))
def test_over_verls_queue_it_gives_what_the_core_gives(pipeline: Pipeline, case: str, run: list[Drawn]) -> None:
    check(default_runs, case, run, empty=pipeline.empty)
