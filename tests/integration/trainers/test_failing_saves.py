"""A save over an older run's checkpoint: the old one stays whole, or is not whole; never a mixture of two runs."""

import copy
import errno
import functools
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.configs import compose
from tests.facts import a_line_says, facts
from tests.integration.hadw_runs import HADW, capability
from tests.integration.trainers import default_runs, ray_runs
from tests.integration.trainers.default_runs import DRGRPO
from verl_ext.advantages import checkpoint
from verl_ext.errors import CheckpointError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
KINDS: dict[str, Callable[[Any], Any]] = {"default": default_runs.made, "RayPPOTrainer": ray_runs.Base}


composed = functools.cache(compose)


class Workers:
    """Worker groups that write two files, of the same size in each run, and may fail before one of them."""

    def __init__(self, name: str, error: BaseException | None = None, written: int = 0, ranks: int = 1) -> None:
        self.name, self.error, self.written, self.world_size = name, error, written, ranks
        self.called = False
        self.found: dict[str, bytes] = {}
        """The files of the checkpoint when these workers began to write."""

    def save_checkpoint(self, local_path: str, *_: object, **__: object) -> None:
        self.called = True
        self.found = files(Path(local_path).parent)
        folder = Path(local_path)
        folder.mkdir(parents=True, exist_ok=True)
        for number, file in enumerate(("model.pt", "optim.pt")):
            if self.error is not None and number == self.written:
                raise self.error
            (folder / file).write_text(self.name)

    def load_checkpoint(self, *_: object, **__: object) -> None: ...


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def trainer(kind: str, home: Path, *overrides: str, workers: Workers, updates: int | None = None) -> Any:
    """A trainer at step 5, whose state is that of some updates."""
    config = copy.deepcopy(composed(*HADW, "trainer.resume_mode=auto", *overrides))
    config.trainer.default_local_dir = str(home)
    made = KINDS[kind](config)
    made.actor_rollout_wg, made.use_critic, made.trainer_mode = workers, False, "sync"
    made.checkpoint_callback = mock.MagicMock()
    made.train_dataloader = mock.MagicMock()
    made.train_dataloader.state_dict.return_value = {"run": workers.name}
    made.train_dataloader.__len__.return_value = 4
    made.global_steps = 5
    if made._verl_ext is not None:
        made._verl_ext.computed_at = 5
    if updates is not None:
        made._verl_ext.state = capability(updates)
        made._verl_ext.accuracy = {"key": "acc", "threshold": None}
    return made


def whole(kind: str, home: Path, *overrides: str, updates: int | None = 9) -> dict[str, bytes]:
    """Save the first run's checkpoint, and return its files."""
    trainer(kind, home, *overrides, workers=Workers("first"), updates=updates)._save_checkpoint()
    for path in home.rglob("*.pt"):  # long ago
        os.utime(path, ns=(1, 1))
    return files(home)


def files(home: Path) -> dict[str, bytes]:
    return {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}


def resume(kind: str, home: Path) -> Any:
    resumed = trainer(kind, home, workers=Workers("resumed"))
    resumed._load_checkpoint()
    return resumed


def assert_not_whole(kind: str, home: Path) -> None:
    assert not (home / "global_step_5/data.pt").exists()
    with pytest.raises(CheckpointError, match=facts("'5'", "trainer.resume_mode=disable")):
        resume(kind, home)


# The settings of the first run and those of the second, and the updates of their states.
RUNS: dict[str, tuple[tuple[str, ...], int | None, tuple[str, ...], int | None]] = {
    "both with a state": ((), 9, (), 3),
    "the second without a state": ((), 9, DRGRPO, None),
    "the first without a state": (DRGRPO, None, (), 3),
}


@pytest.mark.parametrize("runs", RUNS)
def test_a_save_that_fails_before_it_writes_leaves_the_old_checkpoint_whole(
    kind: str, runs: str, tmp_path: Path
) -> None:
    first, updates, second, later = RUNS[runs]
    before = whole(kind, tmp_path, *first, updates=updates)
    failing = trainer(kind, tmp_path, *second, workers=Workers("second", FULL), updates=later)
    message = facts("Step 5", tmp_path / "global_step_5", "No space", "resume", "earlier checkpoint")
    with pytest.raises(CheckpointError, match=message) as raised:
        failing._save_checkpoint()
    assert raised.value.__cause__ is FULL
    assert files(tmp_path) == before
    resumed = resume(kind, tmp_path)
    assert resumed.global_steps == 5
    assert resumed._verl_ext.state == (None if updates is None else capability(updates))


def test_a_save_that_fails_after_a_file_of_the_model_leaves_no_mixture(kind: str, tmp_path: Path) -> None:
    whole(kind, tmp_path)
    failing = trainer(kind, tmp_path, workers=Workers("again", FULL, written=1), updates=3)  # as long as `first`
    with pytest.raises(CheckpointError, match=facts(tmp_path, "No space", "another checkpoint")) as raised:
        failing._save_checkpoint()
    assert raised.value.__cause__ is FULL
    assert_not_whole(kind, tmp_path)


def test_one_of_several_ranks_may_still_write_when_another_has_failed(kind: str, tmp_path: Path) -> None:
    whole(kind, tmp_path)
    failing = trainer(kind, tmp_path, workers=Workers("second", FULL, ranks=2), updates=3)
    with pytest.raises(CheckpointError, match=facts("another checkpoint")):
        failing._save_checkpoint()
    assert_not_whole(kind, tmp_path)


def test_a_save_that_fails_after_the_new_data_keeps_them(kind: str, tmp_path: Path) -> None:
    whole(kind, tmp_path)
    tracker = tmp_path / checkpoint.TRACKER
    tracker.unlink()
    tracker.mkdir()
    old = (tmp_path / "global_step_5/data.pt").read_bytes()
    with pytest.raises(CheckpointError, match=facts("another checkpoint")):
        trainer(kind, tmp_path, workers=Workers("second"), updates=3)._save_checkpoint()
    assert (tmp_path / "global_step_5/data.pt").read_bytes() != old


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_what_a_killed_run_put_aside_never_comes_back(end: type[BaseException], kind: str, tmp_path: Path) -> None:
    """Neither exception is handled: the files are those that a kill leaves."""
    whole(kind, tmp_path)
    with pytest.raises(end):
        trainer(kind, tmp_path, workers=Workers("killed", end()), updates=3)._save_checkpoint()
    assert_not_whole(kind, tmp_path)
    left = files(tmp_path)
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            trainer(kind, tmp_path, workers=Workers("next", FULL), updates=4)._save_checkpoint()
        assert_not_whole(kind, tmp_path)
        assert len(files(tmp_path)) <= len(left)
    clean = whole(kind, tmp_path, updates=6)
    assert sorted(path for path in clean if "actor" not in path) == [
        "global_step_5/data.pt",
        "global_step_5/verl_ext.json",
        checkpoint.TRACKER,
    ]
    assert resume(kind, tmp_path)._verl_ext.state == capability(6)


# Which call fails, from which one on, and the updates of the old state: the old `data.pt` is put aside, then the old
# state; the new one is written to a temporary file and takes its name.
OURS: dict[str, tuple[str, int, int | None]] = {
    "to put data.pt aside": ("pathlib.Path.rename", 1, 9),
    "to put the state aside": ("pathlib.Path.rename", 2, 9),
    "to write the state": ("os.fsync", 1, 9),
    "to name the state": ("os.replace", 1, 9),
    "to write the first state": ("os.replace", 1, None),
}


@pytest.mark.parametrize("failing", OURS)
def test_what_fails_before_verl_begins_leaves_the_old_checkpoint_whole(failing: str, kind: str, tmp_path: Path) -> None:
    where, number, updates = OURS[failing]
    before = whole(kind, tmp_path, *(() if updates else DRGRPO), updates=updates)
    second = trainer(kind, tmp_path, workers=Workers("second"), updates=3)
    rename, calls = Path.rename, []

    def fail(*args: Any) -> Any:
        calls.append(args)
        if where == "pathlib.Path.rename" and len(calls) != number:
            return rename(*args)
        raise FULL

    message = facts("Step 5", tmp_path, "No space", "earlier checkpoint")
    with mock.patch(where, fail), pytest.raises(CheckpointError, match=message):
        second._save_checkpoint()
    assert not second.actor_rollout_wg.called
    assert files(tmp_path) == before
    assert resume(kind, tmp_path).global_steps == 5


def test_the_error_of_a_save_into_a_new_folder_is_verls(kind: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        trainer(kind, tmp_path, workers=Workers("first", FULL), updates=3)._save_checkpoint()


def test_answers_under_way_of_an_earlier_run_are_never_those_of_a_later_one(kind: str, tmp_path: Path) -> None:
    """verl's asynchronous trainers write the folder after `data.pt`: between the two it must not be there."""
    whole(kind, tmp_path)
    queue = tmp_path / "global_step_5/transfer_queue/0"
    queue.mkdir(parents=True)
    (queue / "answers").write_text("first")
    before = files(tmp_path)
    with pytest.raises(CheckpointError):
        trainer(kind, tmp_path, workers=Workers("second", FULL), updates=3)._save_checkpoint()
    assert files(tmp_path) == before
    for written, error in ((1, KeyboardInterrupt()), (1, KeyboardInterrupt()), (2, None)):
        workers = Workers("second", error, written)
        with pytest.raises(KeyboardInterrupt) if error else nullcontext():
            trainer(kind, tmp_path, workers=workers, updates=3)._save_checkpoint()
        assert not queue.parent.exists()
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")]


def test_half_of_a_checkpoint_is_not_resumed_by_its_path_either(kind: str, tmp_path: Path) -> None:
    whole(kind, tmp_path, *DRGRPO, updates=None)
    with pytest.raises(CheckpointError):
        trainer(kind, tmp_path, *DRGRPO, workers=Workers("second", FULL, written=1))._save_checkpoint()
    folder = tmp_path / "global_step_5"
    by_path = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}")
    resumed = trainer(kind, tmp_path, *DRGRPO, *by_path, workers=Workers("resumed"))
    with pytest.raises(CheckpointError, match=facts(folder, "two runs")):
        resumed._load_checkpoint()


# Runs without a state of this package: one that uses nothing of it, and one whose rewards it logs.
GRPO = "algorithm.adv_estimator=grpo"
OF_VERL: dict[str, tuple[str, ...]] = {
    "nothing of this package": (GRPO, "~algorithm.rewards"),
    "named rewards": (GRPO, "algorithm.rewards.keys=[acc]"),
}


@pytest.mark.parametrize("case", OF_VERL)
def test_a_run_of_verls_estimator_removes_the_history_of_the_run_that_it_overwrites(
    case: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before verl writes: the history must never be beside the model of another run."""
    before = whole(kind, tmp_path)
    before.pop("global_step_5/verl_ext.json")
    workers = Workers("second")
    second = trainer(kind, tmp_path, *OF_VERL[case], workers=workers)
    assert (second._verl_ext is None) == (case == "nothing of this package")
    second._save_checkpoint()
    assert {f"global_step_5/{name}": content for name, content in workers.found.items()} == {
        path: content for path, content in before.items() if path.startswith("global_step_5/")
    }
    assert files(tmp_path).keys() == before.keys()
    resumed = resume(kind, tmp_path)
    assert resumed.global_steps == 5
    assert resumed._verl_ext.state is None
    assert a_line_says(caplog.text, "WARNING", "step 5", "verl_ext.json", "starts empty")


def test_a_run_of_verls_estimator_leaves_the_histories_of_other_steps(kind: str, tmp_path: Path) -> None:
    before = whole(kind, tmp_path)
    later = trainer(kind, tmp_path, *OF_VERL["nothing of this package"], workers=Workers("second"))
    later.global_steps = 6
    later._save_checkpoint()
    assert later.actor_rollout_wg.found == {}
    assert not (tmp_path / "global_step_6/verl_ext.json").exists()
    after = files(tmp_path)
    assert {path: after[path] for path in before if path != checkpoint.TRACKER} == {
        path: content for path, content in before.items() if path != checkpoint.TRACKER
    }


READ_ONLY = OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_history_that_cannot_be_removed_ends_the_save_before_verl_writes(kind: str, tmp_path: Path) -> None:
    before = whole(kind, tmp_path)
    second = trainer(kind, tmp_path, *OF_VERL["nothing of this package"], workers=Workers("second"))
    message = facts(tmp_path / "global_step_5/verl_ext.json", "Read-only", "trainer.default_local_dir")
    unlink = mock.patch("pathlib.Path.unlink", side_effect=READ_ONLY)
    with unlink, pytest.raises(CheckpointError, match=message) as raised:
        second._save_checkpoint()
    assert raised.value.__cause__ is READ_ONLY
    assert not second.actor_rollout_wg.called
    assert files(tmp_path) == before
    (tmp_path / "global_step_5/verl_ext.json").unlink()
    with mock.patch("pathlib.Path.unlink", side_effect=READ_ONLY):  # there is none: the save is verl's
        second._save_checkpoint()
    assert second.actor_rollout_wg.called


@pytest.mark.parametrize("config", [None, {}, SimpleNamespace(trainer=SimpleNamespace(default_local_dir=None))])
def test_a_trainer_that_saves_elsewhere_has_no_history_to_remove(config: Any) -> None:
    checkpoint.remove_earlier_state(SimpleNamespace(config=config, global_steps=5))
    checkpoint.remove_earlier_state(SimpleNamespace(config=config))


def test_a_copied_checkpoint_is_resumed_whatever_the_times_of_its_files(kind: str, tmp_path: Path) -> None:
    whole(kind, tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(tmp_path / "copy/global_step_5/verl_ext.json", ns=(2, 2))
    assert resume(kind, tmp_path / "copy")._verl_ext.state == capability(9)
