"""A disk that is full while the estimators' state is saved."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.facts import facts
from tests.integration.hadw_runs import saved, state, train
from tests.integration.pipeline import Pipeline
from verl_ext.core.state import RunState
from verl_ext.errors import CheckpointError
from verl_ext.integration.trainers import checkpoint


@pytest.mark.parametrize("call", ["pathlib.Path.write_text", "os.fsync", "os.replace"])
def test_a_disk_that_is_full_leaves_the_old_state_whichever_call_finds_out(tmp_path: Path, call: str) -> None:
    checkpoint.save(tmp_path, state(2), step=1)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    told = facts("step 2", tmp_path, "No space")
    with mock.patch(call, side_effect=full), pytest.raises(CheckpointError, match=told):
        checkpoint.save(tmp_path, state(3), step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["verl_ext.json"]
    found = RunState()
    assert checkpoint.load(tmp_path, found, step=1) is True
    assert found.states == state(2).states


def test_a_full_disk_stops_the_run_before_verl_marks_the_checkpoint(pipeline: Pipeline, tmp_path: Path) -> None:
    replace, saves = os.replace, []

    def fail_the_second_time(*args: Any) -> None:
        saves.append(args)
        if len(saves) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(*args)

    with (
        mock.patch("verl_ext.files.os.replace", fail_the_second_time),
        pytest.raises(CheckpointError, match=facts("step 2", tmp_path / "global_step_2/verl_ext.json", "No space")),
    ):
        train(pipeline, tmp_path, 3)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert saved(tmp_path, 1)["estimators"]["hadw"]["weigh_by_history"]["ticks"] == 1
    assert not list((tmp_path / "global_step_2").iterdir())
    resumed = train(pipeline, tmp_path, 3, "trainer.resume_mode=auto")
    assert sorted(resumed.metrics) == [2, 3]
    assert saved(tmp_path, 3)["estimators"]["hadw"]["weigh_by_history"]["ticks"] == 3
