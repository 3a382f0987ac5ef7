"""The estimators' state beside verl's checkpoints."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.integration.configs import compose
from tests.integration.pipeline import Pipeline
from verl_ext.core.history import Capability
from verl_ext.core.state import RunState
from verl_ext.errors import CheckpointError
from verl_ext.integration import attach, checkpoint

HADW = ("algorithm.adv_estimator=hadw", "+algorithm.rewards.keys=[acc]")


def state(ticks: int, value: float = 0.1 + 0.2) -> RunState:
    return RunState({"hadw": {"weigh_by_history": Capability("soft", value, (1 / 3, value), ticks)}})


def test_what_was_saved_comes_back_exactly_and_is_plain_json(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "global_step_7", state(3), step=7)
    data = json.loads(path.read_text())
    assert (data["format"], data["global_step"]) == (1, 7)
    assert data["estimators"]["hadw"]["weigh_by_history"] == {
        "anchor": "soft",
        "value": 0.30000000000000004,
        "window": [0.3333333333333333, 0.30000000000000004],
        "ticks": 3,
    }
    found = RunState()
    assert checkpoint.load(path.parent, found) is True
    assert found.states == state(3).states


def test_no_file_is_no_state_and_changes_nothing(tmp_path: Path) -> None:
    found = state(3)
    assert checkpoint.load(tmp_path, found) is False
    assert found.states == state(3).states


DAMAGED = {
    "cut short": ('{"format": 1, "estimators": {"hadw"', "Expecting ':' delimiter"),
    "empty": ("", "Expecting value"),
    "not text": (b"\xff\xfe\x00", "cannot be read"),
    "another kind of file": ("[1, 2]", "it holds no estimators"),
    "of the future": ('{"format": 2, "estimators": {}}', "it has format 2, this version reads 1"),
    "without its numbers": (
        '{"format": 1, "estimators": {"hadw": {"weigh_by_history": {"anchor": "soft"}}}}',
        "capability state needs anchor, value, window and ticks",
    ),
    "with a number that is none": (
        '{"format": 1, "estimators": {"hadw": {"weigh_by_history": '
        '{"anchor": "soft", "value": NaN, "window": [], "ticks": 1}}}}',
        "capability state is damaged",
    ),
    "with an anchor that does not exist": (
        '{"format": 1, "estimators": {"hadw": {"weigh_by_history": '
        '{"anchor": "hard", "value": 0.5, "window": [0.5], "ticks": 1}}}}',
        "capability state is damaged",
    ),
    "with a value and no batch": (
        '{"format": 1, "estimators": {"hadw": {"weigh_by_history": '
        '{"anchor": "soft", "value": 0.5, "window": [0.5], "ticks": 0}}}}',
        "capability state is damaged",
    ),
    "without the window of its batches": (
        '{"format": 1, "estimators": {"hadw": {"weigh_by_history": '
        '{"anchor": "window", "value": 0.5, "window": [], "ticks": 2}}}}',
        "capability state is damaged",
    ),
    "with another value than the last": (
        '{"format": 1, "estimators": {"hadw": {"weigh_by_history": '
        '{"anchor": "soft", "value": 0.5, "window": [0.25], "ticks": 1}}}}',
        "capability state is damaged",
    ),
    "with more batches than it saw": (
        '{"format": 1, "estimators": {"hadw": {"weigh_by_history": '
        '{"anchor": "soft", "value": 0.5, "window": [0.25, 0.5], "ticks": 1}}}}',
        "capability state is damaged",
    ),
    "of an estimator that remembers nothing": ('{"format": 1, "estimators": {"hadw": {}}}', "'hadw' is empty"),
    "of a step that does not exist": (
        '{"format": 1, "estimators": {"hadw": {"weigh_by_moon": {}}}}',
        "state of 'weigh_by_moon' is unknown here, known: 'weigh_by_history'",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named_and_leaves_the_state_as_it_was(case: str, tmp_path: Path) -> None:
    content, part = DAMAGED[case]
    path = tmp_path / "verl_ext.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = state(3)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(tmp_path, found)
    assert str(path) in str(caught.value)
    assert part in str(caught.value)
    assert found.states == state(3).states


def test_a_file_of_another_step_than_its_folder_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "global_step_7", state(3), step=7)
    assert checkpoint.load(tmp_path / "global_step_7", RunState(), step=7) is True
    with pytest.raises(CheckpointError, match="it was written at step 7, the run resumes at 9"):
        checkpoint.load(tmp_path / "global_step_7", RunState(), step=9)


def test_another_anchor_is_noticed_when_the_state_is_read(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "global_step_7", state(3), step=7)
    config = compose(*HADW, f"trainer.default_local_dir={tmp_path}", "+algorithm.hadw.anchor=window")
    trainer = SimpleNamespace(config=config, global_steps=7)
    attach.attach(trainer, config)
    with pytest.raises(CheckpointError, match="is of anchor=soft, this run has algorithm.hadw.anchor=window"):
        attach.load_state(trainer)


KILLED_AT = {
    "halfway through the text": "json.dump = lambda data, file, **_: (file.write('{\"form'), file.flush(), die())",
    "before the text is on the disk": "os.fsync = lambda *_: die()",
    "before the new name": "os.replace = lambda *_: die()",
    "after the new name": "r = os.replace; os.replace = lambda *a: (r(*a), die())",
}


@pytest.mark.parametrize("moment", KILLED_AT)
def test_a_process_killed_while_it_saves_leaves_the_old_state_or_the_new(moment: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state(2), step=1)
    code = f"""
import json, os, signal
from verl_ext.core.history import Capability
from verl_ext.core.state import RunState
from verl_ext.integration import checkpoint
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
{KILLED_AT[moment]}
run = RunState({{"hadw": {{"weigh_by_history": Capability("soft", 0.1 + 0.2, (1 / 3, 0.1 + 0.2), 3)}}}})
checkpoint.save({str(tmp_path)!r}, run, step=2)
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=120).returncode == -9
    found = RunState()
    assert checkpoint.load(tmp_path, found) is True
    assert found.states == state(3 if moment.startswith("after") else 2).states


def test_a_process_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    code = f"""
from verl_ext.core.history import Capability
from verl_ext.core.state import RunState
from verl_ext.integration import checkpoint
ticks = 1000
while True:
    ticks += 1
    window = (*(i / 1000 for i in range(999)), 0.5)
    run = RunState({{"hadw": {{"weigh_by_history": Capability("soft", 0.5, window, ticks)}}}})
    checkpoint.save({str(tmp_path)!r}, run, step=ticks)
"""
    seen = []
    for attempt in range(6):
        process = subprocess.Popen([sys.executable, "-c", code])
        path = tmp_path / "verl_ext.json"
        before = path.stat().st_mtime_ns if path.exists() else 0
        while not path.exists() or path.stat().st_mtime_ns == before:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.003 * attempt)
        process.kill()
        process.wait()
        found = RunState()
        assert checkpoint.load(tmp_path, found) is True
        seen.append(found.states["hadw"]["weigh_by_history"].ticks)
    assert all(ticks > 1000 for ticks in seen)


def test_the_whole_text_is_with_the_system_before_it_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, sync = [], os.fsync

    def fsync(handle: int) -> None:
        seen.append(Path(f"/proc/self/fd/{handle}").resolve())
        if not seen[-1].is_dir():
            json.loads(seen[-1].read_text())
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    checkpoint.save(tmp_path, state(2), step=1)
    assert seen == [tmp_path / f".verl_ext.json.{os.getpid()}.tmp", tmp_path]


def test_the_state_of_another_estimator_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = RunState({"compose": state(3).states["hadw"]})
    checkpoint.save(tmp_path / "global_step_7", other, step=7)
    config = compose(*HADW, f"trainer.default_local_dir={tmp_path}")
    trainer = SimpleNamespace(config=config, global_steps=7)
    attach.attach(trainer, config)
    attach.load_state(trainer)
    path = tmp_path / "global_step_7" / "verl_ext.json"
    assert f"{path} holds no state of hadw: its history starts anew" in caplog.text
    assert "hadw" not in trainer._verl_ext.state.states


def test_a_run_that_starts_afresh_looks_for_no_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = compose(*HADW, f"trainer.default_local_dir={tmp_path}", "trainer.resume_mode=auto")
    trainer = SimpleNamespace(config=config, global_steps=0)
    attach.attach(trainer, config)
    attach.load_state(trainer)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_save_that_fails_leaves_no_litter(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state(2), step=1)
    with mock.patch("os.replace", side_effect=OSError("disk full")), pytest.raises(CheckpointError, match="disk full"):
        checkpoint.save(tmp_path, state(2), step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["verl_ext.json"]


def test_what_a_killed_process_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / ".verl_ext.json.123.tmp").write_text("{")
    checkpoint.save(tmp_path, state(2), step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["verl_ext.json"]


# -- through verl's V1 trainer ---------------------------------------------------------------------------------------


def train(pipeline: Pipeline, folder: Path, steps: int, *overrides: str, cls: type[Any] | None = None) -> Any:
    given = {} if cls is None else {"cls": cls}
    return pipeline.run(
        "history",
        *HADW,
        f"trainer.default_local_dir={folder}",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=1",
        *overrides,
        prompts=2,
        **given,
    )


def saved(folder: Path, step: int) -> Any:
    return json.loads((folder / f"global_step_{step}" / "verl_ext.json").read_text())


HISTORY = ("capability_prior", "capability_posterior", "batch_accuracy", "eta_t", "tick")


def assert_same_step(found: Any, expected: Any, step: int) -> None:
    """The history exactly; sums of floats run over rows in the order in which they were done."""
    one, other = found.metrics[step], expected.metrics[step]
    for name in HISTORY:
        assert one[f"hadw/{name}"] == other[f"hadw/{name}"], name
    for name in other:
        if name.startswith(("hadw/", "advantage/")):
            assert one[name] == pytest.approx(other[name], rel=1e-12, abs=1e-12), name


def capability(result: Any) -> Capability:
    return result.trainer._verl_ext.state.states["hadw"]["weigh_by_history"]


@pytest.mark.parametrize("anchor", ["soft", "window"])
def test_a_resumed_run_goes_on_with_the_same_numbers(pipeline: Pipeline, tmp_path: Path, anchor: str) -> None:
    kind = f"+algorithm.hadw.anchor={anchor}"
    whole = train(pipeline, tmp_path / "whole", 4, kind)
    train(pipeline, tmp_path / "parts", 2, kind)
    resumed = train(pipeline, tmp_path / "parts", 4, kind, "trainer.resume_mode=auto")
    assert sorted(resumed.metrics) == [3, 4]
    for step in (3, 4):
        assert_same_step(resumed, whole, step)
    assert saved(tmp_path / "parts", 4) == saved(tmp_path / "whole", 4)
    assert capability(resumed).ticks == 4


def test_a_resumed_run_reads_the_folder_it_was_given(pipeline: Pipeline, tmp_path: Path) -> None:
    whole = train(pipeline, tmp_path / "whole", 3)
    path = tmp_path / "whole" / "global_step_1"
    again = train(
        pipeline, tmp_path / "again", 2, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"
    )
    assert sorted(again.metrics) == [2]
    assert_same_step(again, whole, 2)


def test_a_fresh_run_reads_nothing(pipeline: Pipeline, tmp_path: Path) -> None:
    train(pipeline, tmp_path, 1)
    fresh = train(pipeline, tmp_path, 1, "trainer.resume_mode=disable")
    assert capability(fresh).ticks == 1


def test_the_state_is_there_before_verl_saves_anything_of_its_own(pipeline: Pipeline, tmp_path: Path) -> None:
    """Or a run killed between the two would resume without its history."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    seen = []

    class Watching(PPOTrainer):
        def fit(self, agents: Any) -> None:
            def save_checkpoint(local: str, *_: Any, **__: Any) -> None:
                seen.append((Path(local).parent / "verl_ext.json").exists())
                seen.append((tmp_path / "latest_checkpointed_iteration.txt").exists())

            self.actor_rollout_wg.save_checkpoint = save_checkpoint
            super().fit(agents)

    train(pipeline, tmp_path, 1, cls=Watching)
    assert seen == [True, False]


def test_a_missing_file_is_a_warning_that_names_it(
    pipeline: Pipeline, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(pipeline, tmp_path, 1)
    path = tmp_path / "global_step_1" / "verl_ext.json"
    path.unlink()
    with caplog.at_level(logging.WARNING, "verl_ext"):
        resumed = train(pipeline, tmp_path, 2, "trainer.resume_mode=auto")
    assert f"resuming at step 1, but {path} does not exist: the history of hadw starts anew" in caplog.text
    assert capability(resumed).ticks == 1


def test_a_damaged_file_stops_the_run(pipeline: Pipeline, tmp_path: Path) -> None:
    train(pipeline, tmp_path, 1)
    path = tmp_path / "global_step_1" / "verl_ext.json"
    path.write_text(path.read_text()[:40])
    with pytest.raises(CheckpointError, match=f"{path} is damaged"):
        train(pipeline, tmp_path, 2, "trainer.resume_mode=auto")


def test_the_state_of_another_anchor_stops_the_run(pipeline: Pipeline, tmp_path: Path) -> None:
    train(pipeline, tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"is of anchor=soft, this run has algorithm\.hadw\.anchor=window"):
        train(pipeline, tmp_path, 2, "+algorithm.hadw.anchor=window", "trainer.resume_mode=auto")


def test_an_estimator_without_state_saves_none(pipeline: Pipeline, tmp_path: Path) -> None:
    pipeline.run(
        "worked",
        "algorithm.adv_estimator=dgpo",
        f"trainer.default_local_dir={tmp_path}",
        "trainer.save_freq=1",
    )
    assert (tmp_path / "latest_checkpointed_iteration.txt").exists()
    assert not list(tmp_path.rglob("verl_ext.json"))


def test_subclasses_with_their_own_checkpoints_keep_the_state(pipeline: Pipeline, tmp_path: Path) -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    class Own(PPOTrainer):
        """Neither method calls `super`."""

        def _save_checkpoint(self) -> None:
            (tmp_path / "own.txt").write_text(str(self.global_steps))

        def _load_checkpoint(self) -> None:
            path = tmp_path / "own.txt"
            self.global_steps = int(path.read_text()) if path.exists() else 0

    class Polite(PPOTrainer):
        def _save_checkpoint(self) -> None:
            super()._save_checkpoint()

        def _load_checkpoint(self) -> None:
            super()._load_checkpoint()

    for cls in (Own, Polite):
        folder = tmp_path / cls.__name__
        train(pipeline, folder, 1, "trainer.resume_mode=auto", cls=cls)
        resumed = train(pipeline, folder, 2, "trainer.resume_mode=auto", cls=cls)
        assert capability(resumed).ticks == 2, cls


# -- the legacy trainer ----------------------------------------------------------------------------------------------


def legacy(folder: Path, *overrides: str) -> Any:
    """verl's own `_save_checkpoint` and `_load_checkpoint` on a trainer without workers."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    class Stub(RayPPOTrainer):
        def __init__(self, config: Any) -> None:
            self.config, self.global_steps, self.use_critic = config, 0, False
            self.actor_rollout_wg = mock.MagicMock()
            self.train_dataloader = mock.MagicMock(**{"state_dict.return_value": {}, "__len__.return_value": 4})

    return Stub(compose(*HADW, f"trainer.default_local_dir={folder}", "trainer.resume_mode=auto", *overrides))


def test_the_legacy_trainer_saves_and_reads_the_state(tmp_path: Path) -> None:
    trainer = legacy(tmp_path)
    trainer.global_steps = 5
    trainer._verl_ext.state.states.update(state(9).states)
    trainer._save_checkpoint()
    assert saved(tmp_path, 5)["global_step"] == 5
    path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_5")
    for folder, overrides in ((tmp_path, ()), (tmp_path / "elsewhere", path)):
        resumed = legacy(folder, *overrides)
        resumed._load_checkpoint()
        assert resumed.global_steps == 5
        assert resumed._verl_ext.state.states == state(9).states
    fresh = legacy(tmp_path, "trainer.resume_mode=disable")
    fresh._load_checkpoint()
    assert fresh._verl_ext.state.states == {}


@pytest.mark.parametrize("estimator", ["dgpo", "grpo", "hadw"])
def test_a_run_without_a_state_takes_away_that_of_the_checkpoint_it_writes_over(
    tmp_path: Path, estimator: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Or the run whose state it was would resume from the other's weights with its own history."""
    for step in (4, 5):
        checkpoint.save(tmp_path / f"global_step_{step}", state(9), step=step)
    keys = ("algorithm.rewards.keys=null",) if estimator == "grpo" else ()
    trainer = legacy(tmp_path, f"algorithm.adv_estimator={estimator}", *keys)
    trainer.global_steps = 5
    seen = []
    path = tmp_path / "global_step_5" / "verl_ext.json"
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    trainer.actor_rollout_wg.save_checkpoint = lambda *_, **__: seen.append((path.exists(), tracker.exists()))
    trainer._save_checkpoint()
    assert seen == [(False, False)]
    assert f"removed {path}: it was the state of another run" in caplog.text
    assert tracker.read_text() == "5"
    assert (tmp_path / "global_step_4" / "verl_ext.json").exists()
    resumed = legacy(tmp_path)
    resumed._load_checkpoint()
    assert resumed._verl_ext.state.states == {}
    assert f"resuming at step 5, but {path} does not exist" in caplog.text


def test_a_state_of_another_run_that_cannot_be_removed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "global_step_5" / "verl_ext.json"
    (path / "below").mkdir(parents=True)
    trainer = legacy(tmp_path, "algorithm.adv_estimator=dgpo")
    trainer.global_steps = 5
    with pytest.raises(CheckpointError, match=f"{path} is the state of another run, .* cannot be removed: "):
        trainer._save_checkpoint()
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()


# -- verl's tracker --------------------------------------------------------------------------------------------------


def checkpoints(folder: Path, *steps: int) -> Path:
    """Checkpoints as verl's legacy trainer leaves them, in the order in which they are given; the tracker's path."""
    for moment, step in enumerate(steps, start=1):
        trainer = legacy(folder)
        trainer.global_steps = step
        trainer._verl_ext.state.states.update(state(step).states)
        home = folder / f"global_step_{step}"
        (home / "actor").mkdir(parents=True)
        (home / "actor" / "model.pt").write_text("weights")
        trainer._save_checkpoint()
        os.utime(home / "data.pt", (moment, moment))
    return folder / "latest_checkpointed_iteration.txt"


@pytest.mark.parametrize("content", ["", "\n"])
def test_an_empty_tracker_is_mended(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    tracker = checkpoints(tmp_path, 8, 9, 10)
    tracker.write_text(content)
    trainer = legacy(tmp_path)
    trainer._load_checkpoint()
    assert trainer.global_steps == 10
    assert trainer._verl_ext.state.states == state(10).states
    assert tracker.read_text() == "10"
    assert f"{tracker} was empty: " in caplog.text
    assert "its newest whole checkpoint is global_step_10" in caplog.text
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


def test_an_estimator_without_a_state_needs_none_to_mend_the_tracker(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("content", [b"five", b"\0", b"\xff", b"5.0"])
def test_a_tracker_with_rubbish_is_an_error_that_says_how_to_go_on(tmp_path: Path, content: bytes) -> None:
    checkpoints(tmp_path, 5).write_bytes(content)
    message = refused(tmp_path)
    assert f"expected the number of its step, found {content!r}; write the step" in message
    remedy = f"trainer.resume_mode=resume_path trainer.resume_from_path={tmp_path}/global_step_N"
    assert f"delete it and set {remedy}" in message
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    trainer = legacy(tmp_path, *remedy.replace("_N", "_5").split())
    trainer._load_checkpoint()
    assert trainer.global_steps == 5


def test_an_empty_tracker_is_left_where_it_is_not_clear_what_it_named(tmp_path: Path) -> None:
    checkpoints(tmp_path / "went back", 9, 10, 7).write_text("")
    assert "global_step_7 was written last, global_step_10 is the highest" in refused(tmp_path / "went back")
    tracker = checkpoints(tmp_path / "none", 1)
    tracker.write_text("")
    (tmp_path / "none" / "global_step_1" / "data.pt").write_text("")
    assert "no global_step_N beside it holds actor, data.pt, verl_ext.json" in refused(tmp_path / "none")
    checkpoints(tmp_path / "async", 1).write_text("")
    async_save = "actor_rollout_ref.actor.checkpoint.async_save=True"
    assert "with async_save the newest may not be whole" in refused(tmp_path / "async", async_save)


def test_no_room_to_mend_the_tracker_is_an_error(tmp_path: Path) -> None:
    checkpoints(tmp_path, 5).write_text("")
    with mock.patch("os.replace", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        message = refused(tmp_path)
    assert "No space left on device; make room, then the run resumes at step 5" in message


@pytest.mark.parametrize("overrides", [("trainer.resume_mode=disable",), ("algorithm.adv_estimator=grpo",)])
def test_a_tracker_that_is_not_ours_to_mend_is_left(tmp_path: Path, overrides: tuple[str, ...]) -> None:
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
