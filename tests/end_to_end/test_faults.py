"""What ends, what goes on and what is refused when a run is disturbed."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.run import end_all, processes_of
from tests.end_to_end.test_training import TIMEOUT, latest, state

pytestmark = [pytest.mark.end_to_end, pytest.mark.slow]

HADW = ("algorithm.adv_estimator=hadw", "algorithm.rewards.accuracy_threshold=0", "trainer.save_freq=1")
# Less than this after a worker's death verl's driver has ended.
END_OF_VERL = 90


# The driver, and the others by the start of their titles.
KINDS = ["driver", "ray::TaskRunnerV1", "ray::WorkerDict", "ray::EmbeddedServer", "ray::RewardLoopWorker"]


def process_of(run, kind):
    if kind == "driver":
        return run.process.pid
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_text(errors="replace") for pid in processes_of(run.mark)}
    return next(pid for pid, title in titles.items() if title.startswith(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_worker_ends_the_run_which_can_be_resumed(start, kind):
    run = start("run", *HADW, steps=500, configuration="[cpu,hadw]")
    run.wait_until(lambda: 2 in run.metrics, TIMEOUT)
    os.kill(process_of(run, kind), signal.SIGKILL)
    assert run.wait(END_OF_VERL) == (-signal.SIGKILL if kind == "driver" else 1)
    left = end_all(run.mark)
    # Ray's own agents may take longer to notice that the driver is gone.
    assert [line for line in left if kind != "driver" or line.startswith("ray::")] == []
    kept = latest(run)
    assert kept >= 1
    assert state(run, kept)["hadw"]["weight_by_history"]["updates"] == kept
    again = start("run", *HADW, steps=kept + 1, configuration="[cpu,hadw]")
    assert again.wait(TIMEOUT) == 0, again.tail()
    assert state(again, kept + 1)["hadw"]["weight_by_history"]["updates"] == kept + 1


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 12 MB where run "run" saves its checkpoints, of 1.3 MB each; returns what gives it another size."""
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        return subprocess.run(command, capture_output=True, text=True)

    if shutil.which("mount") is None or (done := mount("size=12m")).returncode:
        pytest.skip(f"no disk can be mounted: {'there is no mount' if shutil.which('mount') is None else done.stderr}")
    yield lambda size: mount(f"remount,size={size}")
    if subprocess.run(["umount", str(folder)]).returncode:  # a process of the run still has a file open
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_ends_the_run_which_goes_on_when_there_is_room(small_disk, start):
    run = start("run", *HADW, steps=500, configuration="[cpu,hadw]")
    assert run.wait(2 * TIMEOUT) == 1, run.tail()
    kept = latest(run)
    saved = run.folder / "checkpoints"
    folders = {int(path.name.rpartition("_")[2]): path for path in saved.glob("global_step_*")}
    assert kept >= 2
    size = sum(path.stat().st_size for path in folders[kept].rglob("*"))
    assert shutil.disk_usage(saved).free < size  # this is why it ended
    assert kept == max(run.metrics)  # the step whose checkpoint found no room is not in the log
    whole, first = ({path.name for path in folders[step].glob("**/*")} for step in (kept, 1))
    assert whole == first
    assert state(run, kept)["hadw"]["weight_by_history"]["updates"] == kept
    assert small_disk("1g").returncode == 0
    again = start("run", *HADW, steps=kept + 2, configuration="[cpu,hadw]")
    assert again.wait(TIMEOUT) == 0, again.tail()
    assert f"setting global step to {kept}" in again.log
    assert sorted(again.metrics) == [kept + 1, kept + 2]
    assert state(again, kept + 2)["hadw"]["weight_by_history"]["updates"] == kept + 2
