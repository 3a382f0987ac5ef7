"""An estimator's state as a file beside verl's checkpoints, without a trainer's own part."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import fresh
from tests.facts import facts, says
from tests.integration.hadw_checkpoints import state_after
from verl_ext.advantages import checkpoint
from verl_ext.errors import CheckpointError
from verl_ext.registry import build
from verl_ext.run import Run
from verl_ext.settings import Settings

PLAIN: dict[str, Any] = {"rewards": {"keys": ["acc", "format"], "accuracy_key": "acc"}}


def run(home: Path, updates: int | None = None, name: str = "hadw") -> Run:
    """A run at step 7, with a state if it has seen batches."""
    settings = Settings.parse(PLAIN)
    config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir=str(home), resume_mode="auto"))
    trainer = SimpleNamespace(global_steps=7, config=config)
    found = Run(name, settings, build(name, settings), trainer=trainer, computed_at=7)
    if updates is not None:
        found.state = state_after(updates)
        found.accuracy = {"key": settings.rewards.accuracy_key, "threshold": settings.rewards.accuracy_threshold}
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the checkpoint, which verl has written."""
    folder = tmp_path / "global_step_7"
    folder.mkdir()
    return folder


def save(folder: Path) -> None:
    """Save a state as ours and verl do."""
    checkpoint.save_state(run(folder.parent, updates=3))
    (folder / checkpoint.DATA).touch()


def test_what_was_saved_comes_back_exactly_and_is_plain_json(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(folder)
    data = json.loads((folder / checkpoint.FILE).read_text())
    assert data == {
        "verl_ext": data["verl_ext"],
        "global_step": 7,
        "computed_at": 7,
        "estimator": "hadw",
        "keys": ["acc", "format"],
        "weights": [1.0, 1.0],
        "accuracy": {"key": "acc", "threshold": None},
        "state": state_after(3),
    }
    resumed = run(folder.parent)
    checkpoint.load(resumed)
    assert resumed.state == state_after(3)
    assert resumed.accuracy == {"key": "acc", "threshold": None}
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


# What is changed in the file, and the facts of the message.
REFUSED: dict[str, tuple[dict[str, Any], tuple[object, ...]]] = {
    "of another step": ({"global_step": 6}, ("step 6", "step 7")),
    "of another estimator": ({"estimator": "compose"}, ("compose", "hadw")),
    "with a gap": ({"computed_at": 4}, ("step 4", "step 7")),
    "of two steps before": ({"computed_at": 5}, ("step 5", "step 7")),
    "of another accuracy": (
        {"accuracy": {"key": "format", "threshold": None}},
        ("'format'", "'acc'", "accuracy_key=format"),
    ),
    "without its numbers": ({"state": {"weight_by_history": {"anchor": "soft"}}}, ("damaged",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_that_does_not_fit_is_refused_with_the_way_out(case: str, folder: Path) -> None:
    path = folder / checkpoint.FILE
    save(folder)
    change, words = REFUSED[case]
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=facts(path, *words, "delete the file")):
        checkpoint.load(run(folder.parent))


def test_a_state_of_the_step_before_is_that_of_the_saved_model(folder: Path) -> None:
    """A trainer that counts its step before it saves; a second restart without a batch must not make a gap of it."""
    path = folder / checkpoint.FILE
    save(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"computed_at": 6}))
    resumed = run(folder.parent)
    resumed.computed_at = 0
    checkpoint.load(resumed)
    assert resumed.state == state_after(3)
    assert resumed.computed_at == 7


@pytest.mark.parametrize("content", [b'{"global_step": 2, "estim', b"{}", b"\xff\xfe\x00", b"[1, 2]", b"[" * 100_000])
def test_a_damaged_file_is_named(content: bytes, folder: Path) -> None:
    path = folder / checkpoint.FILE
    save(folder)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=facts(path, "cannot be read", "delete the file")):
        checkpoint.load(run(folder.parent))


def test_a_file_that_the_system_cannot_read_is_named(folder: Path) -> None:
    path = folder / checkpoint.FILE
    path.mkdir()
    with pytest.raises(CheckpointError, match=facts(path, "cannot be read", "delete the file")):
        checkpoint.load(run(folder.parent))


@pytest.mark.parametrize("name", ["hadw", "dgpo"])
def test_a_run_without_a_state_replaces_the_state_of_the_checkpoint_that_it_overwrites(name: str, folder: Path) -> None:
    """Otherwise the earlier run would resume from the weights of this run with its own history."""
    save(folder)
    (folder / ".verl_ext.json.123.tmp").touch()  # left by a killed process
    checkpoint.save_state(run(folder.parent, name=name))
    content = json.loads((folder / checkpoint.FILE).read_text())
    assert (content["estimator"], content["state"]) == (name, None)
    assert list(folder.iterdir()) == [folder / checkpoint.FILE]


def resumed_with(folder: Path, name: str, caplog: pytest.LogCaptureFixture, **rewards: Any) -> list[str]:
    """Resume another run from the checkpoint; return its warnings."""
    other = run(folder.parent, name=name)
    if rewards:
        settings = Settings.parse({"rewards": {"keys": ["acc", "format"], **rewards}})
        other.settings = replace(other.settings, rewards=settings.rewards)
    caplog.clear()
    checkpoint.load(other)
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_run_that_resumes_with_another_configuration_is_warned(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint.save_state(run(folder.parent, name="dgpo"))
    (folder / checkpoint.DATA).touch()
    assert resumed_with(folder, "dgpo", caplog) == []
    assert resumed_with(folder, "dgpo", caplog, weights=[1, 1]) == []
    (text,) = resumed_with(folder, "drgrpo", caplog)
    assert says(text, folder, "algorithm.adv_estimator=dgpo", "drgrpo", "trainer.resume_mode=disable")
    (text,) = resumed_with(folder, "dgpo", caplog, weights=[1, 0.5])
    assert says(text, "algorithm.rewards.weights=[1.0, 1.0]", "[1.0, 0.5]")
    (text,) = resumed_with(folder, "dgpo", caplog, keys=["format"])
    assert says(text, "algorithm.rewards.keys=['acc', 'format']", "['format']")
    assert not says(text, "algorithm.adv_estimator")
    # A history that starts in the middle of a run has a warning of its own.
    texts = resumed_with(folder, "hadw", caplog)
    assert [says(text, "starts empty") for text in texts] == [True, False]
    assert says(texts[1], "algorithm.adv_estimator=dgpo")
    (folder / checkpoint.FILE).write_text("{")
    assert says(*resumed_with(folder, "dgpo", caplog), folder / checkpoint.FILE, "cannot be read")
    (folder / checkpoint.FILE).unlink()
    assert says(*resumed_with(folder, "dgpo", caplog), folder / checkpoint.FILE, "does not exist")


KILLED_AT = {
    "before the new name": "os.replace = lambda *_: die()",
    "after the new name": "r = os.replace; os.replace = lambda *a: (r(*a), die())",
}


@pytest.mark.parametrize("moment", KILLED_AT)
def test_a_process_killed_while_it_saves_leaves_no_state_or_the_whole(moment: str, tmp_path: Path) -> None:
    code = f"""
import json, os, pathlib, signal
from tests.integration.trainers.test_checkpoints import run
from verl_ext.advantages import checkpoint
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
{KILLED_AT[moment]}
checkpoint.save_state(run(pathlib.Path({str(tmp_path)!r}), updates=3))
die()
"""
    assert fresh.run(code).returncode == -signal.SIGKILL
    path = tmp_path / "global_step_7" / checkpoint.FILE
    assert path.exists() == moment.startswith("after")
    if path.exists():
        checkpoint.load(run(tmp_path))
