"""Responses that are missing from a step, and rewards that are not as they should be."""

from __future__ import annotations

import logging

import pytest

from tests.facts import a_line_says, facts, says
from tests.integration.pipeline import Pipeline
from tests.integration.trainers.default_runs import ACC, DRGRPO
from verl_ext.errors import DataError

MISSING = "advantage/missing_responses"


LOST: dict[str, tuple[int, int, dict[str, list[float]]]] = {
    # Groups of 4, 2 and 1.
    "uneven": (5, 12, {"A": [0.75, -0.25, -0.25, -0.25], "B": [0.5, -0.5], "C": [0.0]}),
    # A prompt without any response.
    "gone": (4, 8, {"A": [0.75, -0.25, -0.25, -0.25], "B": []}),
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


def test_a_key_that_one_sample_lacks_stops_the_run_and_names_it(pipeline: Pipeline) -> None:
    with pytest.raises(DataError, match=facts("reward 'acc'", "missing", "uid")):
        pipeline.run("other keys", *DRGRPO, ACC)
