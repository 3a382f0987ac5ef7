"""Saves that fail or are killed: a run resumes from the model and the state of one run, or with an error."""

import copy
import errno
import functools
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import transfer_queue
from verl.trainer.ppo.v1 import trainer_base

from tests.configs import compose
from tests.facts import a_line_says, facts
from tests.integration.hadw_checkpoints import HADW, state_after
from tests.integration.trainers import default_runs, ray_runs
from tests.integration.trainers.default_runs import DRGRPO
from verl_ext.advantages import checkpoint
from verl_ext.errors import CheckpointError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
MODEL = ("model.pt", "optim.pt")
# Each kind of trainer with its mode. Trainers that are not synchronous save a queue of unfinished responses.
KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "default": (default_runs.make_trainer, "sync"),
    "asynchronous": (default_runs.make_trainer, "colocate_async"),
    "RayPPOTrainer": (ray_runs.WithMixin, "sync"),
}
# Runs without a state of this package: one that uses nothing of it, and one whose rewards it logs.
GRPO = "algorithm.adv_estimator=grpo"
OF_VERL: dict[str, tuple[str, ...]] = {
    "nothing of this package": (GRPO, "~algorithm.rewards"),
    "named rewards": (GRPO, "algorithm.rewards.keys=[acc]"),
}


class Workers:
    """Worker groups that write the name of their run into two files, and may fail before one of them."""

    def __init__(self, name: str, error: BaseException | None = None, written: int = 0) -> None:
        self.name, self.error, self.written = name, error, written
        self.files_before: dict[str, bytes] | None = None
        """The files of the checkpoint when these workers began to write; None before."""
        self.loaded: set[str] = set()
        """The names in the files that these workers have loaded."""

    def save_checkpoint(self, local_path: str, *_: object, **__: object) -> None:
        folder = Path(local_path)
        self.files_before = files(folder.parent)
        folder.mkdir(parents=True, exist_ok=True)
        for number, file in enumerate(MODEL):
            if self.error is not None and number == self.written:
                raise self.error
            (folder / file).write_text(self.name)

    def load_checkpoint(self, local_path: str, **_: object) -> None:
        for file in MODEL:
            self.loaded.add((Path(local_path) / file).read_text())


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@functools.cache
def made(kind: str, *overrides: str) -> Any:
    """A trainer of a kind, which others are copied from, because making one takes long."""
    make, _ = KINDS[kind]
    return make(compose(*HADW, "trainer.resume_mode=auto", *overrides))


def trainer(kind: str, home: Path, *overrides: str, workers: Workers, updates: int | None = None) -> Any:
    """A trainer at step 5, whose state is that of some updates."""
    copied = copy.copy(made(kind, *overrides))
    settings = copy.deepcopy(copied.config.trainer)
    settings.default_local_dir = str(home)
    copied.config = SimpleNamespace(trainer=settings, actor_rollout_ref=copied.config.actor_rollout_ref)
    copied.actor_rollout_wg, copied.use_critic = workers, False
    _, copied.trainer_mode = KINDS[kind]
    copied.checkpoint_callback = mock.MagicMock()
    copied.train_dataloader = mock.MagicMock()
    copied.train_dataloader.state_dict.return_value = {"run": workers.name}
    copied.train_dataloader.__len__.return_value = 4
    copied.global_steps = 5
    if copied._verl_ext is not None:
        copied._verl_ext = replace(copied._verl_ext, trainer=copied, computed_at=5)
    if updates is not None:
        copied._verl_ext.state = state_after(updates)
        copied._verl_ext.accuracy = {"key": "acc", "threshold": None}
    return copied


def save(saved: Any) -> None:
    """Save a checkpoint. The queue contains the name of the run, and gets its name when it is complete, as in verl."""

    def save_queue(folder: str, **_: object) -> None:
        temporary = Path(f"{folder}.tmp")
        temporary.mkdir()
        (temporary / "responses").write_text(saved.actor_rollout_wg.name)
        if Path(folder).exists():
            shutil.rmtree(folder)
        temporary.rename(folder)

    with mock.patch.object(transfer_queue, "save_checkpoint", save_queue, create=True):
        saved._save_checkpoint()


def save_first(kind: str, home: Path, *overrides: str, updates: int | None = 9) -> dict[str, bytes]:
    """Save the first run's checkpoint, and return its files."""
    save(trainer(kind, home, *overrides, workers=Workers("first"), updates=updates))
    return files(home)


def files(home: Path) -> dict[str, bytes]:
    return {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}


class Resumed(NamedTuple):
    """What a run has loaded."""

    step: int
    state: Any
    runs: set[str]
    """The names of the runs that wrote the model, the position in the data and the queue."""


def resume(kind: str, home: Path, *overrides: str, by_path: bool = False) -> Resumed:
    workers = Workers("resumed")
    resumed = trainer(kind, home, *overrides, workers=workers)
    if by_path:
        resumed.config.trainer.resume_mode = "resume_path"
        resumed.config.trainer.resume_from_path = f"{home}/global_step_5"
    queues = []

    def load_queue(folder: str) -> None:
        queues.append((Path(folder) / "responses").read_text())

    load = mock.patch.object(transfer_queue, "load_checkpoint", load_queue, create=True)
    count = mock.patch.object(trainer_base, "_count_tq_prompt_groups", create=True)
    with load, count:
        resumed._load_checkpoint()
    positions = [call.args[0]["run"] for call in resumed.train_dataloader.load_state_dict.call_args_list]
    return Resumed(resumed.global_steps, resumed._verl_ext.state, {*workers.loaded, *positions, *queues})


def assert_refused(kind: str, home: Path, *overrides: str) -> None:
    with pytest.raises(CheckpointError, match=facts("'5'", "trainer.resume_mode=disable")):
        resume(kind, home, *overrides)
    with pytest.raises(CheckpointError, match=facts(home / "global_step_5", "data.pt", "trainer.resume_from_path")):
        resume(kind, home, *overrides, by_path=True)


def run_that_resumes(kind: str, home: Path, states: dict[str, Any]) -> str:
    """Resume in both ways; return the run that continues, or "refused". Assert that nothing is of another run."""
    results = set()
    for by_path in (False, True):
        try:
            resumed = resume(kind, home, by_path=by_path)
        except CheckpointError:
            results.add("refused")
        else:
            (name,) = resumed.runs
            assert resumed.step == 5
            assert resumed.state == states[name]
            results.add(name)
    (result,) = results
    return result


def killed_before(operation: int, action: Callable[[], None]) -> bool:
    """Act in a child process that is killed before one of its operations that change files. False if it has fewer."""
    count = 0

    def kill(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        opens_to_write = event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if opens_to_write or event in ("os.mkdir", "os.remove", "os.rename", "os.rmdir"):
            count += 1
            if count == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        status = 1
        try:
            sys.addaudithook(kill)
            action()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


# The settings of the first run and those of the second, and the updates of their states.
RUNS: dict[str, tuple[tuple[str, ...], int | None, tuple[str, ...], int | None]] = {
    "both with a state": ((), 9, (), 3),
    "the second without a state": ((), 9, DRGRPO, None),
    "the first without a state": (OF_VERL["nothing of this package"], None, (), 3),
}


@pytest.mark.parametrize("runs", RUNS)
def test_a_save_that_is_killed_at_any_moment_leaves_no_mixture(kind: str, runs: str, tmp_path: Path) -> None:
    """The checkpoint is the first run's, then incomplete, then the second run's."""
    first, first_updates, second, second_updates = RUNS[runs]
    states = {
        "first": None if first_updates is None else state_after(first_updates),
        "second": None if second_updates is None else state_after(second_updates),
    }
    save_first(kind, tmp_path / "first", *first, updates=first_updates)
    home = tmp_path / "killed"
    killed = trainer(kind, home, *second, workers=Workers("second"), updates=second_updates)
    results = []
    for operation in itertools.count(1):
        shutil.copytree(tmp_path / "first", home)
        was_killed = killed_before(operation, lambda: save(killed))
        results.append(run_that_resumes(kind, home, states))
        shutil.rmtree(home)
        if not was_killed:
            break
    assert [result for result, _ in itertools.groupby(results)] == ["first", "refused", "second"]
    assert results.count("refused") >= 4


def test_the_data_file_is_removed_first_and_its_removal_is_synced(kind: str, tmp_path: Path) -> None:
    """It must not come back after a crash of the machine, when verl has overwritten the model."""
    before = save_first(kind, tmp_path)
    before.pop("global_step_5/data.pt")
    synced = []

    def record(folder: Path) -> None:
        synced.append((folder, files(tmp_path)))

    with mock.patch.object(checkpoint, "sync_folder", record):
        save(trainer(kind, tmp_path, workers=Workers("second"), updates=3))
    assert synced == [(tmp_path / "global_step_5", before)]


# verl's asynchronous trainers write the queue after `data.pt`, and the others write none. TransferQueue keeps an older
# queue under the second name while it writes a new one, and restores it if this fails.
@pytest.mark.parametrize("name", ["transfer_queue", "transfer_queue.old"])
def test_the_queue_of_an_earlier_run_is_removed_before_verl_writes(name: str, kind: str, tmp_path: Path) -> None:
    save_first(kind, tmp_path)
    queue = tmp_path / "global_step_5" / name / "0"
    queue.mkdir(parents=True, exist_ok=True)
    (queue / "responses").write_text("first")
    workers = Workers("second")
    save(trainer(kind, tmp_path, workers=workers, updates=3))
    assert workers.files_before is not None
    assert sorted(workers.files_before) == ["actor/model.pt", "actor/optim.pt", "verl_ext.json"]


# What fails, and whether the checkpoint of the first run is still complete then.
OURS: dict[str, tuple[str, bool]] = {
    "to remove data.pt": ("pathlib.Path.unlink", True),
    "to remove the queue": ("shutil.rmtree", False),
    "to write the state": ("pathlib.Path.write_text", False),
    "to sync the state": ("os.fsync", False),
    "to name the state": ("os.replace", False),
}


@pytest.mark.parametrize("failing", OURS)
def test_what_fails_before_verl_begins_is_an_error(failing: str, kind: str, tmp_path: Path) -> None:
    function, is_complete = OURS[failing]
    before = save_first(kind, tmp_path)
    (tmp_path / "global_step_5/transfer_queue").mkdir(exist_ok=True)
    second = trainer(kind, tmp_path, workers=Workers("second"), updates=3)
    message = facts("Step 5", tmp_path / "global_step_5", "No space", "data.pt")
    with mock.patch(function, side_effect=FULL), pytest.raises(CheckpointError, match=message) as raised:
        save(second)
    assert raised.value.__cause__ is FULL
    assert second.actor_rollout_wg.files_before is None
    if is_complete:
        assert files(tmp_path) == before
    else:
        assert_refused(kind, tmp_path)
    save(second)
    assert run_that_resumes(kind, tmp_path, {"second": state_after(3)}) == "second"


def test_a_new_folder_that_cannot_be_made_is_an_error(kind: str, tmp_path: Path) -> None:
    second = trainer(kind, tmp_path, workers=Workers("second"), updates=3)
    message = facts("Step 5", tmp_path / "global_step_5", "No space")
    with mock.patch("pathlib.Path.mkdir", side_effect=FULL), pytest.raises(CheckpointError, match=message):
        save(second)
    assert second.actor_rollout_wg.files_before is None


def test_a_state_that_json_cannot_represent_costs_no_checkpoint(kind: str, tmp_path: Path) -> None:
    before = save_first(kind, tmp_path)
    second = trainer(kind, tmp_path, workers=Workers("second"), updates=3)
    second._verl_ext.state = {"weight_by_history": {1, 2}}
    with pytest.raises(CheckpointError, match=facts("weight_by_history")):
        save(second)
    assert files(tmp_path) == before


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("written", [0, 1])
def test_a_save_that_fails_in_the_model_is_verls_error_and_leaves_no_mixture(
    written: int, runs: str, kind: str, tmp_path: Path
) -> None:
    first, first_updates, second, second_updates = RUNS[runs]
    save_first(kind, tmp_path, *first, updates=first_updates)
    workers = Workers("second", FULL, written)
    with pytest.raises(OSError, match="No space") as raised:
        save(trainer(kind, tmp_path, *second, workers=workers, updates=second_updates))
    assert raised.value is FULL
    assert_refused(kind, tmp_path)


def test_a_save_that_fails_after_the_model_leaves_no_mixture(kind: str, tmp_path: Path) -> None:
    save_first(kind, tmp_path)
    second = trainer(kind, tmp_path, workers=Workers("second"), updates=3)
    second.train_dataloader.state_dict.side_effect = FULL
    with pytest.raises(OSError, match="No space"):
        save(second)
    assert_refused(kind, tmp_path)


def test_a_save_that_fails_in_the_data_is_not_resumed(kind: str, tmp_path: Path) -> None:
    """Not even as the second run, whose model and state are complete: torch cannot load the file."""
    save_first(kind, tmp_path)

    def fail(_: object, path: str) -> None:
        Path(path).touch()
        raise FULL

    with mock.patch.object(torch, "save", fail), pytest.raises(OSError, match="No space"):
        save(trainer(kind, tmp_path, workers=Workers("second"), updates=3))
    for by_path in (False, True):
        with pytest.raises(EOFError):
            resume(kind, tmp_path, by_path=by_path)


def test_a_save_that_fails_after_the_data_is_the_later_run(kind: str, tmp_path: Path) -> None:
    save_first(kind, tmp_path)
    tracker = tmp_path / checkpoint.TRACKER
    tracker.unlink()
    tracker.mkdir()
    with pytest.raises(IsADirectoryError):
        save(trainer(kind, tmp_path, workers=Workers("second"), updates=3))
    tracker.rmdir()
    tracker.write_text("5")
    assert run_that_resumes(kind, tmp_path, {"second": state_after(3)}) == "second"


def test_the_error_of_a_save_into_a_new_folder_is_verls(kind: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        save(trainer(kind, tmp_path, workers=Workers("first", FULL), updates=3))


def test_a_save_after_failing_ones_is_complete_and_leaves_nothing_of_them(kind: str, tmp_path: Path) -> None:
    clean = save_first(kind, tmp_path)
    for name in ("second", "third"):
        with pytest.raises(KeyboardInterrupt):
            save(trainer(kind, tmp_path, workers=Workers(name, KeyboardInterrupt(), written=1), updates=3))
        assert_refused(kind, tmp_path)
    (tmp_path / "global_step_5/.verl_ext.json.123.tmp").touch()  # left by a killed process
    assert save_first(kind, tmp_path, updates=6).keys() == clean.keys()
    assert run_that_resumes(kind, tmp_path, {"first": state_after(6)}) == "first"


@pytest.mark.parametrize("settings", [(), DRGRPO], ids=["with a state", "without a state"])
def test_an_incomplete_checkpoint_is_refused_for_every_estimator(
    settings: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    save_first(kind, tmp_path, *settings, updates=None)
    (tmp_path / "global_step_5/data.pt").unlink()
    assert_refused(kind, tmp_path, *settings)


def test_an_incomplete_checkpoint_is_not_refused_for_verls_estimators(kind: str, tmp_path: Path) -> None:
    save_first(kind, tmp_path)
    (tmp_path / "global_step_5/data.pt").unlink()
    for by_path in (False, True):
        assert resume(kind, tmp_path, *OF_VERL["named rewards"], by_path=by_path).step == 5


@pytest.mark.parametrize("case", OF_VERL)
def test_a_run_of_verls_estimator_removes_the_history_of_the_run_that_it_overwrites(
    case: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before verl writes: the history must never be beside the model of another run."""
    before = save_first(kind, tmp_path)
    before.pop("global_step_5/verl_ext.json")
    workers = Workers("second")
    second = trainer(kind, tmp_path, *OF_VERL[case], workers=workers)
    assert (second._verl_ext is None) == (case == "nothing of this package")
    save(second)
    assert workers.files_before is not None
    assert {f"global_step_5/{name}": content for name, content in workers.files_before.items()} == {
        path: content for path, content in before.items() if path.startswith("global_step_5/")
    }
    assert files(tmp_path).keys() == before.keys()
    resumed = resume(kind, tmp_path)
    assert (resumed.step, resumed.state, resumed.runs) == (5, None, {"second"})
    assert a_line_says(caplog.text, "WARNING", "step 5", "verl_ext.json", "starts empty")


def test_a_run_of_verls_estimator_leaves_the_histories_of_other_steps(kind: str, tmp_path: Path) -> None:
    before = save_first(kind, tmp_path)
    later = trainer(kind, tmp_path, *OF_VERL["nothing of this package"], workers=Workers("second"))
    later.global_steps = 6
    save(later)
    assert later.actor_rollout_wg.files_before == {}
    assert not (tmp_path / "global_step_6/verl_ext.json").exists()
    after = files(tmp_path)
    assert {path: after[path] for path in before if path != checkpoint.TRACKER} == {
        path: content for path, content in before.items() if path != checkpoint.TRACKER
    }


READ_ONLY = OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_history_that_cannot_be_removed_ends_the_save_before_verl_writes(kind: str, tmp_path: Path) -> None:
    before = save_first(kind, tmp_path)
    second = trainer(kind, tmp_path, *OF_VERL["nothing of this package"], workers=Workers("second"))
    message = facts(tmp_path / "global_step_5/verl_ext.json", "Read-only", "trainer.default_local_dir")
    unlink = mock.patch("pathlib.Path.unlink", side_effect=READ_ONLY)
    with unlink, pytest.raises(CheckpointError, match=message) as raised:
        save(second)
    assert raised.value.__cause__ is READ_ONLY
    assert second.actor_rollout_wg.files_before is None
    assert files(tmp_path) == before
    (tmp_path / "global_step_5/verl_ext.json").unlink()
    with mock.patch("pathlib.Path.unlink", side_effect=READ_ONLY):  # there is none: the save is verl's
        save(second)
    assert second.actor_rollout_wg.files_before is not None


@pytest.mark.parametrize("config", [None, {}, SimpleNamespace(trainer=SimpleNamespace(default_local_dir=None))])
def test_a_trainer_that_saves_elsewhere_has_no_history_to_remove(config: Any) -> None:
    checkpoint.remove_earlier_state(SimpleNamespace(config=config, global_steps=5))
    checkpoint.remove_earlier_state(SimpleNamespace(config=config))


def test_a_copied_checkpoint_is_resumed_whatever_the_times_of_its_files(kind: str, tmp_path: Path) -> None:
    save_first(kind, tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(tmp_path / "copy/global_step_5/verl_ext.json", ns=(2, 2))
    assert resume(kind, tmp_path / "copy").state == state_after(9)
