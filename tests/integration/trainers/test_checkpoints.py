"""The state of an estimator as a file in verl's checkpoints, without a trainer."""

import json
import signal
from collections.abc import Callable
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

ACCURACY = {"key": "acc", "threshold": None}


def run_of(home: Path, updates: int | None = None, name: str = "hadw") -> Run:
    """Return a run at step 7, whose state is that after a number of updates."""
    settings = Settings.parse({"rewards": {"keys": ["acc", "format"], "accuracy_key": "acc"}})
    config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir=str(home), resume_mode="auto"))
    trainer = SimpleNamespace(global_steps=7, config=config)
    run = Run(name, settings, build(name, settings), trainer=trainer, computed_at=7)
    if updates is not None:
        run.state = state_after(updates)
        run.accuracy = ACCURACY
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a checkpoint that verl has written."""
    folder = tmp_path / "global_step_7"
    folder.mkdir()
    return folder


def save(folder: Path) -> Path:
    """Save a complete checkpoint. Return the path of the state file."""
    checkpoint.save_state(run_of(folder.parent, updates=3))
    (folder / checkpoint.DATA).touch()
    return folder / checkpoint.FILE


def change_file(path: Path, changes: dict[str, Any]) -> None:
    """Change entries of a state file."""
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


def test_a_state_is_saved_as_plain_json_and_loaded_exactly(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(folder)
    data = json.loads(path.read_text())
    assert data == {
        "verl_ext": data["verl_ext"],
        "global_step": 7,
        "computed_at": 7,
        "estimator": "hadw",
        "keys": ["acc", "format"],
        "weights": [1.0, 1.0],
        "accuracy": ACCURACY,
        "state": state_after(3),
    }
    resumed = run_of(folder.parent)
    checkpoint.load(resumed)
    assert resumed.state == state_after(3)
    assert resumed.accuracy == ACCURACY
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


# The entries that are changed in the file, and the words of the error.
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
def test_a_state_of_another_run_or_step_is_refused(case: str, folder: Path) -> None:
    path = save(folder)
    changes, words = REFUSED[case]
    change_file(path, changes)
    with pytest.raises(CheckpointError, match=facts(path, *words, "delete the file")):
        checkpoint.load(run_of(folder.parent))


def test_a_state_of_the_step_before_is_that_of_the_saved_model(folder: Path) -> None:
    """Such a trainer counts its step before it saves. A second restart without a batch must not become a gap."""
    path = save(folder)
    change_file(path, {"computed_at": 6})
    resumed = run_of(folder.parent)
    resumed.computed_at = 0
    checkpoint.load(resumed)
    assert resumed.state == state_after(3)
    assert resumed.computed_at == 7


@pytest.mark.parametrize(
    "content",
    [b'{"global_step": 2, "estim', b"{}", b"\xff\xfe\x00", b"[1, 2]", b"[" * 100_000],
    ids=["truncated", "empty", "not UTF-8", "a list", "too deep"],
)
def test_a_damaged_file_is_an_error_that_names_it(content: bytes, folder: Path) -> None:
    path = save(folder)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=facts(path, "cannot be read", "delete the file")):
        checkpoint.load(run_of(folder.parent))


def test_an_unreadable_file_is_an_error_that_names_it(folder: Path) -> None:
    path = folder / checkpoint.FILE
    path.mkdir()
    with pytest.raises(CheckpointError, match=facts(path, "cannot be read", "delete the file")):
        checkpoint.load(run_of(folder.parent))


@pytest.mark.parametrize("name", ["hadw", "dgpo"])
def test_a_run_without_a_state_replaces_the_state_in_its_checkpoint(name: str, folder: Path) -> None:
    """Otherwise the earlier run would resume from the weights of this run with its own history."""
    path = save(folder)
    (folder / ".verl_ext.json.123.tmp").touch()  # a killed process has left this file
    checkpoint.save_state(run_of(folder.parent, name=name))
    content = json.loads(path.read_text())
    assert content["estimator"] == name
    assert content["state"] is None
    assert list(folder.iterdir()) == [path]


@pytest.fixture
def dgpo_checkpoint(folder: Path) -> Path:
    """Return the folder of a complete checkpoint of dgpo."""
    checkpoint.save_state(run_of(folder.parent, name="dgpo"))
    (folder / checkpoint.DATA).touch()
    return folder


@pytest.fixture
def warnings_of_resume(dgpo_checkpoint: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Return a function that resumes another run from `dgpo_checkpoint` and returns the warnings."""

    def resume(name: str, **rewards: Any) -> list[str]:
        run = run_of(dgpo_checkpoint.parent, name=name)
        if rewards:
            settings = Settings.parse({"rewards": {"keys": ["acc", "format"], **rewards}})
            run.settings = replace(run.settings, rewards=settings.rewards)
        caplog.clear()
        checkpoint.load(run)
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    return resume


def test_resuming_with_the_same_configuration_is_not_warned_about(warnings_of_resume) -> None:
    assert warnings_of_resume("dgpo") == []
    assert warnings_of_resume("dgpo", weights=[1, 1]) == []


def test_resuming_with_another_estimator_is_warned_about(warnings_of_resume, dgpo_checkpoint: Path) -> None:
    (text,) = warnings_of_resume("drgrpo")
    assert says(text, dgpo_checkpoint, "algorithm.adv_estimator=dgpo", "drgrpo", "trainer.resume_mode=disable")


def test_resuming_with_other_weights_or_keys_is_warned_about(warnings_of_resume) -> None:
    (text,) = warnings_of_resume("dgpo", weights=[1, 0.5])
    assert says(text, "algorithm.rewards.weights=[1.0, 1.0]", "[1.0, 0.5]")
    (text,) = warnings_of_resume("dgpo", keys=["format"])
    assert says(text, "algorithm.rewards.keys=['acc', 'format']", "['format']")
    assert not says(text, "algorithm.adv_estimator")


def test_a_history_that_starts_empty_is_warned_about(warnings_of_resume) -> None:
    empty_history, other_estimator = warnings_of_resume("hadw")
    assert says(empty_history, "starts empty")
    assert not says(other_estimator, "starts empty")
    assert says(other_estimator, "algorithm.adv_estimator=dgpo")


def test_an_unreadable_or_missing_file_is_warned_about_without_a_state(
    warnings_of_resume, dgpo_checkpoint: Path
) -> None:
    path = dgpo_checkpoint / checkpoint.FILE
    path.write_text("{")
    (text,) = warnings_of_resume("dgpo")
    assert says(text, path, "cannot be read")
    path.unlink()
    (text,) = warnings_of_resume("dgpo")
    assert says(text, path, "does not exist")


# Statements that let the process die at a moment of the save.
KILLED_AT = {
    "before the rename": "os.replace = lambda *_: die()",
    "after the rename": "rename = os.replace; os.replace = lambda *paths: (rename(*paths), die())",
}


@pytest.mark.parametrize("moment", KILLED_AT)
def test_a_killed_save_leaves_no_state_or_all_of_it(moment: str, tmp_path: Path) -> None:
    program = f"""
import json, os, pathlib, signal
from tests.integration.trainers.test_checkpoints import run_of
from verl_ext.advantages import checkpoint
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
{KILLED_AT[moment]}
checkpoint.save_state(run_of(pathlib.Path({str(tmp_path)!r}), updates=3))
die()
"""
    assert fresh.run(program).returncode == -signal.SIGKILL
    path = tmp_path / "global_step_7" / checkpoint.FILE
    if moment == "before the rename":
        assert not path.exists()
    else:
        checkpoint.load(run_of(tmp_path))
