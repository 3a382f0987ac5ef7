"""The estimators' state as a file beside verl's checkpoints."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.facts import a_line_says, facts
from tests.integration.configs import compose
from tests.integration.hadw_runs import HADW, state
from verl_ext.core.state import RunState
from verl_ext.errors import CheckpointError
from verl_ext.integration.trainers import attach, checkpoint


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
    "another kind of file": ("[1, 2]", "'estimators'"),
    "of the future": ('{"format": 2, "estimators": {}}', "it has format 2, this version reads 1"),
    "without its numbers": (
        '{"format": 1, "estimators": {"hadw": {"weigh_by_history": {"anchor": "soft"}}}}',
        "{'anchor': 'soft'}",
    ),
    "with a number that is none": (
        '{"format": 1, "estimators": {"hadw": {"weigh_by_history": '
        '{"anchor": "soft", "value": NaN, "window": [], "ticks": 1}}}}',
        "capability state is damaged",
    ),
    "of an estimator that remembers nothing": ('{"format": 1, "estimators": {"hadw": {}}}', "'hadw' is empty"),
    "of a step that does not exist": (
        '{"format": 1, "estimators": {"hadw": {"weigh_by_moon": {}}}}',
        "weigh_by_moon",
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
    with pytest.raises(CheckpointError, match=facts(tmp_path / "global_step_7", "step 7", "at 9")):
        checkpoint.load(tmp_path / "global_step_7", RunState(), step=9)


KILLED_AT = {
    "halfway through the text": "pathlib.Path.write_text = lambda path, *_, **__: (path.write_bytes(b'{'), die())",
    "before the text is on the disk": "os.fsync = lambda *_: die()",
    "before the new name": "os.replace = lambda *_: die()",
    "after the new name": "r = os.replace; os.replace = lambda *a: (r(*a), die())",
}


@pytest.mark.parametrize("moment", KILLED_AT)
def test_a_process_killed_while_it_saves_leaves_the_old_state_or_the_new(moment: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, state(2), step=1)
    code = f"""
import json, os, pathlib, signal
from verl_ext.core.state import RunState
from verl_ext.integration.trainers import checkpoint
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
{KILLED_AT[moment]}
run = RunState({{"hadw": {{"weigh_by_history": {{"anchor": "soft", "value": 0.1 + 0.2, "window": [1 / 3, 0.1 + 0.2], "ticks": 3}}}}}})
checkpoint.save({str(tmp_path)!r}, run, step=2)
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=120).returncode == -9
    found = RunState()
    assert checkpoint.load(tmp_path, found) is True
    assert found.states == state(3 if moment.startswith("after") else 2).states


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
    assert a_line_says(caplog.text, path, "hadw")
    assert "hadw" not in attach.run_of(trainer).state.states


def test_a_run_that_starts_afresh_looks_for_no_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = compose(*HADW, f"trainer.default_local_dir={tmp_path}", "trainer.resume_mode=auto")
    trainer = SimpleNamespace(config=config, global_steps=0)
    attach.attach(trainer, config)
    attach.load_state(trainer)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_a_killed_process_left_is_removed_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / ".verl_ext.json.123.tmp").write_text("{")
    checkpoint.save(tmp_path, state(2), step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["verl_ext.json"]
