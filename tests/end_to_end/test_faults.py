"""Runs that end because a process is killed or a disk is full, and that are resumed."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.run import end_all, processes_of
from tests.end_to_end.test_training import TIMEOUT, latest, state, steps_saved

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]

HADW = ("algorithm.adv_estimator=hadw", "algorithm.rewards.accuracy_threshold=0", "trainer.save_freq=1")
# Seconds after the death of a worker until verl's driver has ended.
END_OF_VERL = 90
# The driver, and other processes by the start of their titles.
KINDS = ["driver", "ray::TaskRunnerV1", "ray::WorkerDict", "ray::EmbeddedServer", "ray::RewardLoopWorker"]


def updates_in(run, step):
    """Return the number of updates in the history that a checkpoint has."""
    return state(run, step)["hadw"]["weight_by_history"]["updates"]


def process_of(run, kind):
    """Return a process of a kind."""
    if kind == "driver":
        return run.process.pid
    for pid in processes_of(run.mark):
        title = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        if title.startswith(kind):
            return pid
    raise AssertionError(f"no process of the run is a {kind}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_process_ends_the_run_which_can_be_resumed(start, kind):
    run = start("run", *HADW, steps=500, configuration="[cpu,hadw]")
    run.wait_until(lambda: 2 in run.metrics, TIMEOUT)
    os.kill(process_of(run, kind), signal.SIGKILL)
    assert run.wait(END_OF_VERL) == (-signal.SIGKILL if kind == "driver" else 1)
    remaining_processes = end_all(run.mark)
    if kind == "driver":
        # Ray's own agents may take longer to notice that the driver has ended.
        remaining_processes = [line for line in remaining_processes if line.startswith("ray::")]
    assert remaining_processes == []

    saved_step = latest(run)
    assert saved_step >= 1
    assert updates_in(run, saved_step) == saved_step
    resumed = start("run", *HADW, steps=saved_step + 1, configuration="[cpu,hadw]")
    assert resumed.wait(TIMEOUT) == 0, resumed.tail()
    assert updates_in(resumed, saved_step + 1) == saved_step + 1


@pytest.fixture
def resize_disk(tmp_path):
    """Mount a disk of 12 MB for the checkpoints of run "run", of 1.3 MB each. Return a function that resizes it."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    if shutil.which("mount") is None:
        pytest.skip("no disk can be mounted: there is no mount")

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True, text=True)

    mounted = mount("size=12m")
    if mounted.returncode != 0:
        pytest.skip(f"no disk can be mounted: {mounted.stderr}")
    yield lambda size: mount(f"remount,size={size}")
    unmounted = subprocess.run(["umount", str(folder)])
    if unmounted.returncode != 0:  # a process of the run still has an open file
        subprocess.run(["umount", "-l", str(folder)], check=True)


def file_names(folder):
    return {path.name for path in folder.glob("**/*")}


def test_a_full_disk_ends_the_run_which_resumes_with_more_space(resize_disk, start):
    run = start("run", *HADW, steps=500, configuration="[cpu,hadw]")
    assert run.wait(2 * TIMEOUT) == 1, run.tail()
    saved_step = latest(run)
    assert saved_step >= 2
    folders = steps_saved(run)
    size_of_checkpoint = sum(path.stat().st_size for path in folders[saved_step].rglob("*"))
    free_space = shutil.disk_usage(run.folder / "checkpoints").free
    assert free_space < size_of_checkpoint
    # The step whose checkpoint did not fit is not in the log.
    assert max(run.metrics) == saved_step
    # The last complete checkpoint has the same files as the first.
    assert file_names(folders[saved_step]) == file_names(folders[1])
    assert updates_in(run, saved_step) == saved_step

    assert resize_disk("1g").returncode == 0
    resumed = start("run", *HADW, steps=saved_step + 2, configuration="[cpu,hadw]")
    assert resumed.wait(TIMEOUT) == 0, resumed.tail()
    assert f"setting global step to {saved_step}" in resumed.log
    assert sorted(resumed.metrics) == [saved_step + 1, saved_step + 2]
    assert updates_in(resumed, saved_step + 2) == saved_step + 2
