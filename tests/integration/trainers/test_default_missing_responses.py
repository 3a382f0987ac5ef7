"""Responses that are missing from a step, and rewards that are not as they should be."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from tests.facts import a_line_says, facts, says
from tests.integration.pipeline import Pipeline, answers_to
from tests.integration.trainers.default_runs import ACC, DRGRPO
from verl_ext.errors import DataError

MISSING = "advantage/missing_responses"


LOST: dict[str, tuple[int, int, dict[str, list[float]]]] = {
    # Groups of 4, 2 and 1.
    "uneven": (5, 12, {"A": [0.75, -0.25, -0.25, -0.25], "B": [0.5, -0.5], "C": [0.0]}),
    # A prompt without any response.
    "gone": (4, 8, {"A": [0.75, -0.25, -0.25, -0.25], "B": []}),
    # The reward function raises for one response.
    "raising": (1, 8, {"A": [2 / 3, -1 / 3, -1 / 3], "B": [0.5, 0.5, -0.5, -0.5]}),
}


@pytest.mark.parametrize("scene", LOST)
def test_responses_that_did_not_come_are_left_out_counted_and_said(
    pipeline: Pipeline, scene: str, caplog: pytest.LogCaptureFixture
) -> None:
    missing, expected, advantages = LOST[scene]
    with caplog.at_level(logging.WARNING, "verl_ext"):
        result = pipeline.run(scene, *DRGRPO, ACC)
    (update,) = result.updates
    assert len(update.rows()) == expected - missing
    found = {
        name: sorted(update.advantage(row) for row in update.rows() if update.prompts[row] == name)
        for name in advantages
    }
    assert found == {name: pytest.approx(sorted(values)) for name, values in advantages.items()}
    assert result.metrics[1][MISSING] == missing
    assert a_line_says(caplog.text, "step 1", f"{missing} of {expected} responses")
    assert says(caplog.text, MISSING, "sync_refill_failed_groups=True")


def test_where_nothing_came_verl_stops(pipeline: Pipeline) -> None:
    with pytest.raises(RuntimeError, match="sync_refill_failed_groups"):
        pipeline.run("nothing", *DRGRPO, ACC)


def test_a_reward_of_nan_is_not_scored_and_the_others_are(pipeline: Pipeline) -> None:
    result = pipeline.run("unscored", *DRGRPO, ACC)
    (update,) = result.updates
    expected = answers_to("unscored", [2 / 3, -1 / 3, -1 / 3, 0.0], [0.5, 0.5, -0.5, -0.5])
    assert update.by_answer() == pytest.approx(expected)
    assert result.metrics[1]["reward/acc/unscored"] == 1
    assert result.metrics[1][MISSING] == 0
    assert all(np.isfinite(update.advantages[row]).all() for row in range(len(update.keys)))


def test_a_key_that_one_sample_lacks_stops_the_run_and_names_it(pipeline: Pipeline) -> None:
    with pytest.raises(DataError, match=facts("reward 'acc'", "missing", "uid")):
        pipeline.run("other keys", *DRGRPO, ACC)
