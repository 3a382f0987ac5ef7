"""Saves that fail or are killed. Afterwards a run resumes from model and state of the same run, or with an error."""

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
READ_ONLY = OSError(errno.EROFS, os.strerror(errno.EROFS))
MODEL = ("model.pt", "optim.pt")
# Each kind of trainer with its mode. Trainers that are not synchronous save a queue of unfinished responses.
KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "default": (default_runs.make_trainer, "sync"),
    "asynchronous": (default_runs.make_trainer, "colocate_async"),
    "RayPPOTrainer": (ray_runs.WithMixin, "sync"),
}
GRPO = "algorithm.adv_estimator=grpo"
RUNS_WITHOUT_STATE: dict[str, tuple[str, ...]] = {
    "without verl_ext": (GRPO, "~algorithm.rewards"),
    "named rewards": (GRPO, "algorithm.rewards.keys=[acc]"),
}
"""Runs of verl's grpo: one that does not use verl_ext, and one whose rewards verl_ext logs."""


class Workers:
    """Worker groups that write the name of their run into two files.

    If there is an error, it is raised after `written` of the files.
    """

    def __init__(self, name: str, error: BaseException | None = None, written: int = 0) -> None:
        self.name = name
        self.error = error
        self.written = written
        self.files_before: dict[str, bytes] | None = None
        """The files of the checkpoint before these workers wrote, or None if they have not written."""
        self.loaded: set[str] = set()
        """The names in the files that these workers have loaded."""

    def save_checkpoint(self, local_path: str, *_: object, **__: object) -> None:
        folder = Path(local_path)
        self.files_before = files_of(folder.parent)
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
def cached_trainer(kind: str, *overrides: str) -> Any:
    """Return a trainer that others are copied from, because it takes long to make."""
    make, _ = KINDS[kind]
    return make(compose(*HADW, "trainer.resume_mode=auto", *overrides))


def trainer_of(kind: str, home: Path, *overrides: str, workers: Workers, updates: int | None = None) -> Any:
    """Return a trainer at step 5, whose state is that after a number of updates."""
    trainer = copy.copy(cached_trainer(kind, *overrides))
    settings = copy.deepcopy(trainer.config.trainer)
    settings.default_local_dir = str(home)
    trainer.config = SimpleNamespace(trainer=settings, actor_rollout_ref=trainer.config.actor_rollout_ref)
    trainer.actor_rollout_wg = workers
    trainer.use_critic = False
    _, trainer.trainer_mode = KINDS[kind]
    trainer.checkpoint_callback = mock.MagicMock()
    trainer.train_dataloader = mock.MagicMock()
    trainer.train_dataloader.state_dict.return_value = {"run": workers.name}
    trainer.train_dataloader.__len__.return_value = 4
    trainer.global_steps = 5
    if trainer._verl_ext is not None:
        trainer._verl_ext = replace(trainer._verl_ext, trainer=trainer, computed_at=5)
    if updates is not None:
        trainer._verl_ext.state = state_after(updates)
        trainer._verl_ext.accuracy = {"key": "acc", "threshold": None}
    return trainer


def second_trainer(kind: str, home: Path) -> Any:
    """Return the trainer of a second run, whose state is that after 3 updates."""
    return trainer_of(kind, home, workers=Workers("second"), updates=3)


def save(trainer: Any) -> None:
    """Save a checkpoint with a queue that contains the name of the run.

    As in verl, the queue has a temporary name until it is complete.
    """

    def save_queue(folder: str, **_: object) -> None:
        temporary = Path(f"{folder}.tmp")
        temporary.mkdir()
        (temporary / "responses").write_text(trainer.actor_rollout_wg.name)
        if Path(folder).exists():
            shutil.rmtree(folder)
        temporary.rename(folder)

    with mock.patch.object(transfer_queue, "save_checkpoint", save_queue, create=True):
        trainer._save_checkpoint()


def save_first(kind: str, home: Path, *overrides: str, updates: int | None = 9) -> dict[str, bytes]:
    """Save the checkpoint of the first run. Return its files."""
    save(trainer_of(kind, home, *overrides, workers=Workers("first"), updates=updates))
    return files_of(home)


def files_of(home: Path) -> dict[str, bytes]:
    """Return the content of each file by its relative path."""
    return {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}


class Resumed(NamedTuple):
    """What a run has loaded."""

    step: int
    state: Any
    runs: set[str]
    """The names of the runs that wrote the model, the position in the data and the queue."""


def resume(kind: str, home: Path, *overrides: str, by_path: bool = False) -> Resumed:
    """Resume from the tracker's checkpoint or, with `by_path`, from the folder of step 5."""
    workers = Workers("resumed")
    trainer = trainer_of(kind, home, *overrides, workers=workers)
    if by_path:
        trainer.config.trainer.resume_mode = "resume_path"
        trainer.config.trainer.resume_from_path = f"{home}/global_step_5"
    runs = set()

    def load_queue(folder: str) -> None:
        runs.add((Path(folder) / "responses").read_text())

    load = mock.patch.object(transfer_queue, "load_checkpoint", load_queue, create=True)
    count = mock.patch.object(trainer_base, "_count_tq_prompt_groups", create=True)
    with load, count:
        trainer._load_checkpoint()
    runs |= workers.loaded
    for call in trainer.train_dataloader.load_state_dict.call_args_list:
        runs.add(call.args[0]["run"])
    return Resumed(trainer.global_steps, trainer._verl_ext.state, runs)


def assert_refused(kind: str, home: Path, *overrides: str) -> None:
    """Assert that the checkpoint is refused in both ways of resuming."""
    with pytest.raises(CheckpointError, match=facts("'5'", "trainer.resume_mode=disable")):
        resume(kind, home, *overrides)
    with pytest.raises(CheckpointError, match=facts(home / "global_step_5", "data.pt", "trainer.resume_from_path")):
        resume(kind, home, *overrides, by_path=True)


def run_that_resumes(kind: str, home: Path, states: dict[str, Any]) -> str:
    """Resume in both ways. Return the run that continues, or "refused". Assert that nothing is of another run."""
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


def assert_second_resumes(kind: str, home: Path) -> None:
    assert run_that_resumes(kind, home, {"second": state_after(3)}) == "second"


CHANGES_OF_FILES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir")


def is_killed_before(operation: int, action: Callable[[], None]) -> bool:
    """Act in a child process that is killed before its nth operation that changes files.

    Return False if the action has fewer operations.
    """
    operations = 0

    def count_and_kill(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal operations
        opens_to_write = event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if opens_to_write or event in CHANGES_OF_FILES:
            operations += 1
            if operations == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        status = 1
        try:
            sys.addaudithook(count_and_kill)
            action()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0


class TwoRuns(NamedTuple):
    """A first run, and a second run that saves over its checkpoint: their overrides and the updates of their states."""

    first: tuple[str, ...]
    first_updates: int | None
    second: tuple[str, ...]
    second_updates: int | None


RUNS = {
    "both with a state": TwoRuns((), 9, (), 3),
    "the second without a state": TwoRuns((), 9, DRGRPO, None),
    "the first without a state": TwoRuns(RUNS_WITHOUT_STATE["without verl_ext"], None, (), 3),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_save_killed_at_any_moment_leaves_no_mixture_of_runs(kind: str, case: str, tmp_path: Path) -> None:
    """The checkpoint is the first run's, then incomplete, then the second run's."""
    runs = RUNS[case]
    states = {
        "first": None if runs.first_updates is None else state_after(runs.first_updates),
        "second": None if runs.second_updates is None else state_after(runs.second_updates),
    }
    save_first(kind, tmp_path / "first", *runs.first, updates=runs.first_updates)
    home = tmp_path / "killed"
    second = trainer_of(kind, home, *runs.second, workers=Workers("second"), updates=runs.second_updates)
    results = []
    for operation in itertools.count(1):
        shutil.copytree(tmp_path / "first", home)
        was_killed = is_killed_before(operation, lambda: save(second))
        results.append(run_that_resumes(kind, home, states))
        shutil.rmtree(home)
        if not was_killed:
            break
    assert [result for result, _ in itertools.groupby(results)] == ["first", "refused", "second"]
    assert results.count("refused") >= 4


def test_the_data_file_is_removed_first_and_its_removal_is_synced(kind: str, tmp_path: Path) -> None:
    """After a crash of the machine, the data file must not reappear next to the overwritten model."""
    expected_files = save_first(kind, tmp_path)
    del expected_files["global_step_5/data.pt"]
    synced = []

    def record(folder: Path) -> None:
        synced.append((folder, files_of(tmp_path)))

    with mock.patch.object(checkpoint, "sync_folder", record):
        save(second_trainer(kind, tmp_path))
    assert synced == [(tmp_path / "global_step_5", expected_files)]


# verl's asynchronous trainers write the queue after `data.pt`, and the others write none. TransferQueue keeps an older
# queue under the second name while it writes a new one, and restores the older queue if writing fails.
@pytest.mark.parametrize("name", ["transfer_queue", "transfer_queue.old"])
def test_the_queue_of_an_earlier_run_is_removed_before_verl_writes(name: str, kind: str, tmp_path: Path) -> None:
    save_first(kind, tmp_path)
    queue = tmp_path / "global_step_5" / name / "0"
    queue.mkdir(parents=True, exist_ok=True)
    (queue / "responses").write_text("first")
    second = second_trainer(kind, tmp_path)
    save(second)
    files_before = second.actor_rollout_wg.files_before
    assert files_before is not None
    assert sorted(files_before) == ["actor/model.pt", "actor/optim.pt", "verl_ext.json"]


# The function that fails, and whether the checkpoint of the first run is still complete then.
FAILURES: dict[str, tuple[str, bool]] = {
    "to remove data.pt": ("pathlib.Path.unlink", True),
    "to remove the queue": ("shutil.rmtree", False),
    "to write the state": ("pathlib.Path.write_text", False),
    "to sync the state": ("os.fsync", False),
    "to rename the state": ("os.replace", False),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_before_verl_writes_is_an_error(case: str, kind: str, tmp_path: Path) -> None:
    function, is_complete = FAILURES[case]
    files_of_first = save_first(kind, tmp_path)
    (tmp_path / "global_step_5/transfer_queue").mkdir(exist_ok=True)
    second = second_trainer(kind, tmp_path)
    message = facts("Step 5", tmp_path / "global_step_5", "No space", "data.pt")
    with mock.patch(function, side_effect=FULL), pytest.raises(CheckpointError, match=message) as raised:
        save(second)
    assert raised.value.__cause__ is FULL
    assert second.actor_rollout_wg.files_before is None
    if is_complete:
        assert files_of(tmp_path) == files_of_first
    else:
        assert_refused(kind, tmp_path)
    save(second)
    assert_second_resumes(kind, tmp_path)


def test_a_new_folder_that_cannot_be_made_is_an_error(kind: str, tmp_path: Path) -> None:
    second = second_trainer(kind, tmp_path)
    message = facts("Step 5", tmp_path / "global_step_5", "No space")
    with mock.patch("pathlib.Path.mkdir", side_effect=FULL), pytest.raises(CheckpointError, match=message):
        save(second)
    assert second.actor_rollout_wg.files_before is None


def test_a_state_that_json_cannot_represent_damages_no_checkpoint(kind: str, tmp_path: Path) -> None:
    files_of_first = save_first(kind, tmp_path)
    second = second_trainer(kind, tmp_path)
    second._verl_ext.state = {"weight_by_history": {1, 2}}
    with pytest.raises(CheckpointError, match=facts("weight_by_history")):
        save(second)
    assert files_of(tmp_path) == files_of_first


@pytest.mark.parametrize("case", RUNS)
@pytest.mark.parametrize("written", [0, 1])
def test_a_save_that_fails_in_the_model_is_refused(written: int, case: str, kind: str, tmp_path: Path) -> None:
    runs = RUNS[case]
    save_first(kind, tmp_path, *runs.first, updates=runs.first_updates)
    workers = Workers("second", FULL, written)
    second = trainer_of(kind, tmp_path, *runs.second, workers=workers, updates=runs.second_updates)
    with pytest.raises(OSError, match="No space") as raised:
        save(second)
    assert raised.value is FULL
    assert_refused(kind, tmp_path)


def test_a_save_that_fails_after_the_model_is_refused(kind: str, tmp_path: Path) -> None:
    save_first(kind, tmp_path)
    second = second_trainer(kind, tmp_path)
    second.train_dataloader.state_dict.side_effect = FULL
    with pytest.raises(OSError, match="No space"):
        save(second)
    assert_refused(kind, tmp_path)


def test_a_save_that_fails_in_the_data_file_is_not_resumed(kind: str, tmp_path: Path) -> None:
    """The model and the state of the second run are complete, but torch cannot load the data file."""
    save_first(kind, tmp_path)

    def fail(_: object, path: str) -> None:
        Path(path).touch()
        raise FULL

    with mock.patch.object(torch, "save", fail), pytest.raises(OSError, match="No space"):
        save(second_trainer(kind, tmp_path))
    for by_path in (False, True):
        with pytest.raises(EOFError):
            resume(kind, tmp_path, by_path=by_path)


def test_a_save_that_fails_after_the_data_file_is_the_second_runs(kind: str, tmp_path: Path) -> None:
    save_first(kind, tmp_path)
    tracker = tmp_path / checkpoint.TRACKER
    tracker.unlink()
    tracker.mkdir()
    with pytest.raises(IsADirectoryError):
        save(second_trainer(kind, tmp_path))
    tracker.rmdir()
    tracker.write_text("5")
    assert_second_resumes(kind, tmp_path)


def test_a_failed_save_into_a_new_folder_raises_verls_error(kind: str, tmp_path: Path) -> None:
    trainer = trainer_of(kind, tmp_path, workers=Workers("first", FULL), updates=3)
    with pytest.raises(OSError, match="No space"):
        save(trainer)


def test_a_save_after_failed_saves_is_complete(kind: str, tmp_path: Path) -> None:
    files_without_failures = save_first(kind, tmp_path)
    for name in ("second", "third"):
        workers = Workers(name, KeyboardInterrupt(), written=1)
        with pytest.raises(KeyboardInterrupt):
            save(trainer_of(kind, tmp_path, workers=workers, updates=3))
        assert_refused(kind, tmp_path)
    (tmp_path / "global_step_5/.verl_ext.json.123.tmp").touch()  # a killed process has left this file
    assert save_first(kind, tmp_path, updates=6).keys() == files_without_failures.keys()
    assert run_that_resumes(kind, tmp_path, {"first": state_after(6)}) == "first"


@pytest.mark.parametrize("overrides", [(), DRGRPO], ids=["with a state", "without a state"])
def test_an_incomplete_checkpoint_is_refused_for_estimators_of_verl_ext(
    overrides: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    save_first(kind, tmp_path, *overrides, updates=None)
    (tmp_path / "global_step_5/data.pt").unlink()
    assert_refused(kind, tmp_path, *overrides)


def test_an_incomplete_checkpoint_is_not_refused_for_estimators_of_verl(kind: str, tmp_path: Path) -> None:
    save_first(kind, tmp_path)
    (tmp_path / "global_step_5/data.pt").unlink()
    for by_path in (False, True):
        resumed = resume(kind, tmp_path, *RUNS_WITHOUT_STATE["named rewards"], by_path=by_path)
        assert resumed.step == 5


@pytest.mark.parametrize("case", RUNS_WITHOUT_STATE)
def test_a_run_of_verls_grpo_removes_the_history_before_verl_writes(
    case: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The history must never be next to the model of another run."""
    save_first(kind, tmp_path)
    folder = tmp_path / "global_step_5"
    expected_files = files_of(folder)
    del expected_files["verl_ext.json"]
    second = trainer_of(kind, tmp_path, *RUNS_WITHOUT_STATE[case], workers=Workers("second"))
    assert (second._verl_ext is None) == (case == "without verl_ext")
    save(second)
    assert second.actor_rollout_wg.files_before == expected_files
    assert files_of(folder).keys() == expected_files.keys()
    resumed = resume(kind, tmp_path)
    assert resumed.step == 5
    assert resumed.state is None
    assert resumed.runs == {"second"}
    assert a_line_says(caplog.text, "WARNING", "step 5", "verl_ext.json", "starts empty")


def test_a_run_of_verls_grpo_keeps_the_histories_of_other_steps(kind: str, tmp_path: Path) -> None:
    save_first(kind, tmp_path)
    files_of_first = files_of(tmp_path / "global_step_5")
    second = trainer_of(kind, tmp_path, *RUNS_WITHOUT_STATE["without verl_ext"], workers=Workers("second"))
    second.global_steps = 6
    save(second)
    assert second.actor_rollout_wg.files_before == {}
    assert not (tmp_path / "global_step_6/verl_ext.json").exists()
    assert files_of(tmp_path / "global_step_5") == files_of_first


def test_a_history_that_cannot_be_removed_is_an_error_before_verl_writes(kind: str, tmp_path: Path) -> None:
    files_of_first = save_first(kind, tmp_path)
    second = trainer_of(kind, tmp_path, *RUNS_WITHOUT_STATE["without verl_ext"], workers=Workers("second"))
    path = tmp_path / "global_step_5/verl_ext.json"
    message = facts(path, "Read-only", "trainer.default_local_dir")
    unlink = mock.patch("pathlib.Path.unlink", side_effect=READ_ONLY)
    with unlink, pytest.raises(CheckpointError, match=message) as raised:
        save(second)
    assert raised.value.__cause__ is READ_ONLY
    assert second.actor_rollout_wg.files_before is None
    assert files_of(tmp_path) == files_of_first


def test_without_a_history_a_read_only_folder_is_left_to_verl(kind: str, tmp_path: Path) -> None:
    save_first(kind, tmp_path)
    second = trainer_of(kind, tmp_path, *RUNS_WITHOUT_STATE["without verl_ext"], workers=Workers("second"))
    (tmp_path / "global_step_5/verl_ext.json").unlink()
    with mock.patch("pathlib.Path.unlink", side_effect=READ_ONLY):
        save(second)
    assert second.actor_rollout_wg.files_before is not None


@pytest.mark.parametrize(
    "config",
    [None, {}, SimpleNamespace(trainer=SimpleNamespace(default_local_dir=None))],
    ids=["no configuration", "an empty configuration", "no folder"],
)
def test_a_trainer_without_a_checkpoint_folder_has_no_history_to_remove(config: Any) -> None:
    checkpoint.remove_earlier_state(SimpleNamespace(config=config, global_steps=5))
    checkpoint.remove_earlier_state(SimpleNamespace(config=config))


def test_a_copied_checkpoint_is_resumed_whatever_the_times_of_its_files(kind: str, tmp_path: Path) -> None:
    save_first(kind, tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(tmp_path / "copy/global_step_5/verl_ext.json", ns=(2, 2))
    assert resume(kind, tmp_path / "copy").state == state_after(9)
