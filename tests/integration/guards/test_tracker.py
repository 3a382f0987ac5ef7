"""verl's tracker, which names the current checkpoint, where it is no good."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from tests.facts import says
from tests.integration.hadw_runs import legacy, state
from verl_ext.errors import CheckpointError
from verl_ext.integration.trainers.attach import run_of


def checkpoints(folder: Path, *steps: int) -> Path:
    """Checkpoints as verl's legacy trainer leaves them, in the order in which they are given; the tracker's path."""
    for moment, step in enumerate(steps, start=1):
        trainer = legacy(folder)
        trainer.global_steps = step
        run_of(trainer).state.states.update(state(step).states)
        home = folder / f"global_step_{step}"
        (home / "actor").mkdir(parents=True)
        (home / "actor" / "model.pt").write_text("weights")
        trainer._save_checkpoint()
        os.utime(home / "data.pt", (moment, moment))
    return folder / "latest_checkpointed_iteration.txt"


@pytest.mark.parametrize("content", ["", "\n"])
def test_an_empty_tracker_is_repaired(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    tracker = checkpoints(tmp_path, 8, 9, 10)
    tracker.write_text(content)
    trainer = legacy(tmp_path)
    trainer._load_checkpoint()
    assert trainer.global_steps == 10
    assert run_of(trainer).state.states == state(10).states
    assert tracker.read_text() == "10"
    assert str(tracker) in caplog.text
    assert "global_step_10" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [tracker.name]


@pytest.mark.parametrize("missing", ["actor/model.pt", "data.pt", "verl_ext.json", "critic/model.pt"])
def test_a_checkpoint_that_is_not_whole_is_passed_over(tmp_path: Path, missing: str) -> None:
    tracker = checkpoints(tmp_path, 8, 9)
    tracker.write_text("")
    (tmp_path / "global_step_notes").mkdir()
    for step in (8, 9):
        (tmp_path / f"global_step_{step}" / "critic").mkdir()
        (tmp_path / f"global_step_{step}" / "critic" / "model.pt").write_text("weights")
    (tmp_path / "global_step_9" / missing).unlink()
    trainer = legacy(tmp_path)
    trainer.use_critic, trainer.critic_wg = True, mock.MagicMock()
    trainer._load_checkpoint()
    assert (trainer.global_steps, tracker.read_text()) == (8, "8")


def test_an_estimator_without_state_needs_none_to_repair_the_tracker(tmp_path: Path) -> None:
    tracker = checkpoints(tmp_path, 8)
    (tmp_path / "global_step_8" / "verl_ext.json").unlink()
    tracker.write_text("")
    trainer = legacy(tmp_path, "algorithm.adv_estimator=dgpo")
    trainer._load_checkpoint()
    assert trainer.global_steps == 8


def refused(folder: Path, *overrides: str) -> str:
    """The error, after which the tracker is as it was."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    before = tracker.read_bytes()
    with pytest.raises(CheckpointError) as caught:
        legacy(folder, *overrides)._load_checkpoint()
    assert tracker.read_bytes() == before
    assert str(caught.value).startswith(f"{tracker} ")
    return str(caught.value)


def test_a_checkpoint_that_is_gone_is_an_error(tmp_path: Path) -> None:
    checkpoints(tmp_path, 5).write_text("6")
    message = refused(tmp_path)
    assert says(message, "global_step_6", f"trainer.resume_from_path={tmp_path}/global_step_N")
    assert says(message, "trainer.resume_mode=disable")


@pytest.mark.parametrize("content", [b"five", b"\0", b"\xff", b"5.0"])
def test_a_tracker_with_rubbish_is_an_error_that_says_how_to_go_on(tmp_path: Path, content: bytes) -> None:
    checkpoints(tmp_path, 5).write_bytes(content)
    message = refused(tmp_path)
    remedy = f"trainer.resume_mode=resume_path trainer.resume_from_path={tmp_path}/global_step_N"
    assert says(message, repr(content), "delete", remedy)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    trainer = legacy(tmp_path, *remedy.replace("_N", "_5").split())
    trainer._load_checkpoint()
    assert trainer.global_steps == 5


def test_an_empty_tracker_is_left_where_it_is_not_clear_what_it_named(tmp_path: Path) -> None:
    checkpoints(tmp_path / "went back", 9, 10, 7).write_text("")
    went_back = refused(tmp_path / "went back")
    assert "global_step_7" in went_back
    assert "global_step_10" in went_back
    tracker = checkpoints(tmp_path / "none", 1)
    tracker.write_text("")
    (tmp_path / "none" / "global_step_1" / "data.pt").write_text("")
    assert "actor, data.pt, verl_ext.json" in refused(tmp_path / "none")
    checkpoints(tmp_path / "async", 1).write_text("")
    async_save = "actor_rollout_ref.actor.checkpoint.async_save=True"
    assert "async_save" in refused(tmp_path / "async", async_save)


def test_no_room_to_repair_the_tracker_is_an_error(tmp_path: Path) -> None:
    checkpoints(tmp_path, 5).write_text("")
    with mock.patch("os.replace", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        message = refused(tmp_path)
    assert "No space left on device" in message
    assert "step 5" in message


@pytest.mark.parametrize("overrides", [("trainer.resume_mode=disable",), ("algorithm.adv_estimator=grpo",)])
def test_a_tracker_that_is_not_ours_to_repair_is_left(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    tracker = checkpoints(tmp_path, 5)
    tracker.write_text("")
    keys = ("algorithm.rewards.keys=null",) if "grpo" in overrides[0] else ()
    trainer = legacy(tmp_path, *overrides, *keys)
    if keys:
        with pytest.raises(ValueError, match="invalid literal"):
            trainer._load_checkpoint()
    else:
        trainer._load_checkpoint()
    assert tracker.read_text() == ""
