"""Two runs in one checkpoint folder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.facts import a_line_says, facts, says
from tests.integration.configs import compose
from tests.integration.hadw_runs import legacy
from verl_ext.errors import ConfigurationError
from verl_ext.integration.driver import wrap_checked
from verl_ext.integration.guards import guard, run_lock
from verl_ext.settings import VerlExtSettings

HOLD = "import sys, time; from verl_ext.integration.guards import run_lock; run_lock.hold(sys.argv[1])"


def other(folder: Path, *, then: str) -> subprocess.Popen[str]:
    """Another process that holds the folder."""
    command = [sys.executable, "-W", "ignore", "-c", f"{HOLD}; print('held', flush=True); {then}", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    process = other(tmp_path, then="time.sleep(100)")
    yield process
    process.kill()
    process.wait()


def test_the_second_run_is_refused_and_told_who_has_the_folder(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        run_lock.hold(tmp_path, patience=0.3)
    assert says(caught.value, f"trainer.default_local_dir={tmp_path}", f"process {owner.pid}", os.uname().nodename)
    assert says(caught.value, f"delete {tmp_path / run_lock.FILE}")


def test_a_killed_owner_leaves_no_lock(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    run_lock.hold(tmp_path, patience=0.0)
    assert str(os.getpid()) in (tmp_path / run_lock.OWNER).read_text()


def test_an_owner_that_is_about_to_end_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    process = other(tmp_path, then="time.sleep(1)")
    run_lock.hold(tmp_path)  # with the patience that a run has
    assert a_line_says(caplog.text, tmp_path, f"process {process.pid}")
    process.wait()


def test_a_fork_of_the_owner_does_not_keep_the_folder(tmp_path: Path) -> None:
    """A data loader's worker may outlive a trainer that was killed."""
    fork = "import os; pid = os.fork(); (time.sleep(5) if pid == 0 else os.kill(os.getpid(), 9))"
    process = other(tmp_path, then=fork)
    assert process.wait() == -9
    run_lock.hold(tmp_path, patience=20)


def test_one_process_may_train_twice_in_a_folder(tmp_path: Path) -> None:
    run_lock.hold(tmp_path)
    run_lock.hold(tmp_path / ".." / tmp_path.name)


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = facts(f"trainer.default_local_dir={tmp_path}/file", "Not a directory")
    with pytest.raises(ConfigurationError, match=told):
        run_lock.hold(tmp_path / "file" / "checkpoints")


CHECKPOINTS = "trainer.default_local_dir=FOLDER"
DUMP = "+algorithm.verl_ext.dump_dir=FOLDER"
NAMED = "algorithm.rewards.keys=[acc]"


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        ((CHECKPOINTS, "algorithm.adv_estimator=hadw", "trainer.save_freq=1"), "checkpoints"),
        ((CHECKPOINTS, "algorithm.adv_estimator=hadw", "trainer.save_freq=-1"), None),
        ((CHECKPOINTS, "algorithm.adv_estimator=grpo", "trainer.save_freq=1"), None),
        ((DUMP, "algorithm.adv_estimator=gdpo"), DUMP.removeprefix("+")),
        ((DUMP, "algorithm.adv_estimator=grpo", NAMED), DUMP.removeprefix("+")),
        ((DUMP, "algorithm.adv_estimator=grpo", "algorithm.rewards.keys=null"), None),
    ],
    ids=["ours", "saves nothing", "verl's own", "ours dumps", "verl's own dumps rewards", "verl's own dumps nothing"],
)
def test_a_trainer_claims_its_folders(
    tmp_path: Path,
    owner: subprocess.Popen[str],
    overrides: tuple[str, ...],
    refused: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_lock, "hold", partial(run_lock.hold, patience=0.0))
    # The fully asynchronous one's rollouter is such a trainer, and is let be.
    trainer = legacy(tmp_path / "own", *(override.replace("FOLDER", str(tmp_path)) for override in overrides))
    if refused is None:
        trainer._load_checkpoint()
        return
    with pytest.raises(
        ConfigurationError, match=facts("another run", refused.replace("FOLDER", str(tmp_path)), f"process {owner.pid}")
    ):
        trainer._load_checkpoint()


def driver(folder: Path, *overrides: str) -> None:
    """What verl's entry points call before Ray starts, and for some is all that they call."""
    went_on = False

    def original(config: Any) -> None:
        nonlocal went_on
        went_on = True

    try:
        wrap_checked(original)(compose(f"trainer.default_local_dir={folder}", *overrides))
    except ConfigurationError:
        assert not went_on
        raise
    assert went_on


@pytest.mark.parametrize("save_freq", [1, 0, -1])
def test_the_driver_refuses_a_folder_that_is_held_before_anything_is_built(
    tmp_path: Path, owner: subprocess.Popen[str], save_freq: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "require_free", partial(run_lock.require_free, patience=0.0))
    saving = f"trainer.save_freq={save_freq}"
    driver(tmp_path, saving, "algorithm.adv_estimator=grpo")
    if save_freq > 0:
        with pytest.raises(ConfigurationError, match=facts("another run", "checkpoints", f"process {owner.pid}")):
            driver(tmp_path, saving, "algorithm.adv_estimator=dgpo")
    else:
        driver(tmp_path, saving, "algorithm.adv_estimator=dgpo")
    dump = f"+algorithm.verl_ext.dump_dir={tmp_path}"
    with pytest.raises(ConfigurationError, match=facts("another run", "advantages", f"process {owner.pid}")):
        driver(tmp_path / "other", saving, "algorithm.adv_estimator=dgpo", dump)
    if save_freq > 0:  # both in one folder, of which the checkpoints are the greater loss
        with pytest.raises(ConfigurationError, match=facts("another run", "checkpoints")):
            driver(tmp_path, saving, "algorithm.adv_estimator=dgpo", dump)


def test_the_driver_waits_for_an_owner_that_is_about_to_end_and_claims_nothing(tmp_path: Path) -> None:
    process = other(tmp_path, then="time.sleep(1)")
    saving = "trainer.save_freq=1", "algorithm.adv_estimator=dgpo"
    driver(tmp_path, *saving)  # with the patience that a run has
    assert process.wait(5) == 0
    after = other(tmp_path, then="pass")
    assert after.wait(10) == 0
    driver(tmp_path / "new", *saving)
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    driver(tmp_path / "empty", *saving)
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_look_lets_go_of_nothing_that_this_process_holds(tmp_path: Path) -> None:
    run_lock.hold(tmp_path)
    run_lock.require_free(tmp_path)
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{HOLD.removesuffix(')')}, patience=0.0)", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 1
    assert says(told.stderr, f"process {os.getpid()}")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL], ids=errno.errorcode.get)
def test_a_file_system_without_locks_turns_the_guard_off_with_one_warning(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(guard, "_off", set())
    for _ in range(2):
        guard.attempt("lock_folders", VerlExtSettings(), run_lock.hold, tmp_path, patience=0.0)
    (record,) = (record for record in caplog.records if "lock_folders" in record.getMessage())
    assert os.strerror(number) in record.getMessage()


def test_the_owner_is_the_last_one(tmp_path: Path) -> None:
    (tmp_path / run_lock.OWNER).write_text("process 1 on another machine, whose name is long, since long ago\n" * 9)
    run_lock.hold(tmp_path)
    (line,) = (tmp_path / run_lock.OWNER).read_text().splitlines()
    assert line.startswith(f"process {os.getpid()} on {os.uname().nodename} since ")


def test_without_room_for_the_owners_name_the_folder_is_held_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", write)
    run_lock.hold(tmp_path)
    monkeypatch.undo()
    assert os.strerror(errno.ENOSPC) in caplog.text
    code = f"{HOLD.rpartition(';')[0]}; run_lock.hold(sys.argv[1], patience=0.0)"
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert a_line_says(done.stderr, "another run", "checkpoints", tmp_path)


def test_the_guard_can_be_switched_off(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    off = VerlExtSettings(lock_folders=False)
    guard.attempt("lock_folders", off, run_lock.hold, tmp_path, patience=0.0)
    driver(tmp_path, "trainer.save_freq=1", "algorithm.adv_estimator=dgpo", "+algorithm.verl_ext.lock_folders=False")
