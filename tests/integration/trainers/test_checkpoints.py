"""An estimator's state as a file beside verl's checkpoints, without a trainer's own part."""

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import fresh
from tests.facts import facts
from tests.integration.hadw_runs import capability
from verl_ext.errors import CheckpointError
from verl_ext.integration import checkpoint
from verl_ext.integration.run import Run
from verl_ext.registry import build
from verl_ext.settings import Settings

PLAIN: dict[str, Any] = {"rewards": {"keys": ["acc", "format"], "accuracy_key": "acc"}}


def run(home: Path, updates: int | None = None, name: str = "hadw") -> Run:
    """A run at step 7, with a state if it has seen batches."""
    settings = Settings.parse(PLAIN)
    config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir=str(home), resume_mode="auto"))
    trainer = SimpleNamespace(global_steps=7, config=config)
    found = Run(name, settings, build(name, settings), trainer=trainer, computed_at=7)
    if updates is not None:
        found.state = capability(updates)
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
    with checkpoint.saving(run(folder.parent, updates=3)):
        (folder / checkpoint.DATA).touch()


def test_what_was_saved_comes_back_exactly_and_is_plain_json(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(folder)
    data = json.loads((folder / checkpoint.FILE).read_text())
    assert data == {
        "verl_ext": data["verl_ext"],
        "global_step": 7,
        "overwrites": True,
        "computed_at": 7,
        "estimator": "hadw",
        "accuracy": {"key": "acc", "threshold": None},
        "state": capability(3),
    }
    resumed = run(folder.parent)
    checkpoint.load(resumed)
    assert resumed.state == capability(3)
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
    change, told = REFUSED[case]
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=facts(path, *told, "delete the file")):
        checkpoint.load(run(folder.parent))


def test_a_state_of_the_step_before_is_that_of_the_saved_model(folder: Path) -> None:
    """A trainer that counts its step before it saves; a second restart without a batch must not make a gap of it."""
    path = folder / checkpoint.FILE
    save(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"computed_at": 6}))
    resumed = run(folder.parent)
    resumed.computed_at = 0
    checkpoint.load(resumed)
    assert resumed.state == capability(3)
    assert resumed.computed_at == 7


@pytest.mark.parametrize("content", [b'{"global_step": 2, "estim', b"\xff\xfe\x00", b"[1, 2]", b"[" * 100_000])
def test_a_damaged_file_is_named(content: bytes, folder: Path) -> None:
    path = folder / checkpoint.FILE
    save(folder)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=facts(path, "cannot be read", "delete the file")):
        checkpoint.load(run(folder.parent))


@pytest.mark.parametrize("name", ["hadw", "dgpo"])
def test_a_run_without_a_state_takes_away_that_of_the_checkpoint_it_writes_over(name: str, folder: Path) -> None:
    """Or the run whose state it was would resume from the other's weights with its own history."""
    save(folder)
    (folder / ".verl_ext.json.123.tmp").touch()  # left by a killed process
    with checkpoint.saving(run(folder.parent, name=name)):
        assert not (folder / checkpoint.FILE).exists()
        assert not (folder / checkpoint.DATA).exists()
    assert list(folder.iterdir()) == []


KILLED_AT = {
    "before the new name": "os.replace = lambda *_: die()",
    "after the new name": "r = os.replace; os.replace = lambda *a: (r(*a), die())",
}


@pytest.mark.parametrize("moment", KILLED_AT)
def test_a_process_killed_while_it_saves_leaves_no_state_or_the_whole(moment: str, tmp_path: Path) -> None:
    code = f"""
import json, os, pathlib, signal
from tests.integration.trainers.test_checkpoints import run
from verl_ext.integration import checkpoint
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
{KILLED_AT[moment]}
with checkpoint.saving(run(pathlib.Path({str(tmp_path)!r}), updates=3)):
    die()
"""
    assert fresh.run(code).returncode == -signal.SIGKILL
    path = tmp_path / "global_step_7" / checkpoint.FILE
    assert path.exists() == moment.startswith("after")
    if path.exists():
        checkpoint.load(run(tmp_path))
