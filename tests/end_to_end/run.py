"""One run of verl's own entry point in its own processes, with its metrics and its remaining processes.

Every process of a run, Ray's included, inherits a mark in its environment and is found by the mark. So no other Ray
cluster of the machine is affected.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests import tiny_model
from tests.fresh import as_from_a_terminal

MARK = "VERL_EXT_TEST_RUN"
ROOT = str(Path(__file__).parents[2])
PYTHON_PATH = os.environ.get("PYTHONPATH")
FINDS_TESTS = {"PYTHONPATH": f"{ROOT}{os.pathsep}{PYTHON_PATH}" if PYTHON_PATH else ROOT}
"""The environment of a run whose processes import a module of the tests."""
OWN_METRICS = {
    "gdpo": ("gdpo/whiten_std",),
    "dgpo": ("dgpo/balance_z", "dgpo/zero_variance_fraction", "dgpo/valid_groups"),
    "hadw": ("hadw/capability_prior", "hadw/capability_posterior", "hadw/batch_accuracy", "hadw/eta_t"),
}


def has_mark(process: Path, mark: str) -> bool:
    """Return whether a folder of /proc is that of a running process whose environment has the mark."""
    try:
        is_zombie = "\nState:\tZ" in (process / "status").read_text()
        environment = (process / "environ").read_bytes().split(b"\0")
    except OSError:  # the process has ended
        return False
    return not is_zombie and f"{MARK}={mark}".encode() in environment


def processes_of(mark: str) -> list[int]:
    """Return the processes whose environment has the mark."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and has_mark(Path(f"/proc/{pid}"), mark)]


def end_all(mark: str, patience: float = 60.0) -> list[str]:
    """Kill the processes with the mark that are left after a while. Return their command lines.

    Ray's workers notice on their own that their node has ended. On a busy machine, that can take more than 15 seconds.
    """
    deadline = time.monotonic() + patience
    pids = processes_of(mark)
    while pids and time.monotonic() < deadline:
        time.sleep(0.2)
        pids = processes_of(mark)
    command_lines = []
    for pid in pids:
        with suppress(OSError):  # the process has ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            command_lines.append(b" ".join(words).decode())
            os.kill(pid, signal.SIGKILL)
    return command_lines


def metrics_of(path: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of each step from verl's file logger. A step that was logged twice has its last values."""
    steps: dict[int, dict[str, float]] = {}
    if not path.exists():
        return steps
    with path.open() as lines:
        for line in lines:
            record = json.loads(line)
            steps.setdefault(record["step"], {}).update(record["data"])
    return steps


def check_estimator(name: str, metrics: Mapping[int, Mapping[str, float]], steps: Iterable[int]) -> None:
    """Assert that each of the steps has a gradient and the metrics of the estimator."""
    names = ("advantage/mean", "advantage/std", "advantage/zero_fraction", *OWN_METRICS[name])
    for step in steps:
        assert metrics[step]["actor/grad_norm"] > 0, step
        for metric in names:
            assert math.isfinite(metrics[step][metric]), (step, metric)


@dataclass
class Run:
    """A run that was started."""

    folder: Path
    process: subprocess.Popen
    mark: str
    ray_folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        return metrics_of(self.folder / "metrics.jsonl")

    def column(self, name: str) -> list[float]:
        """Return the values of a metric in the order of the steps that logged it."""
        metrics = self.metrics
        return [metrics[step][name] for step in sorted(metrics) if name in metrics[step]]

    def wait_until(self, reached: Callable[[], bool], timeout: float, pause: float = 0.1) -> None:
        """Return when `reached` returns True. Fail if the run ends before."""
        deadline = time.monotonic() + timeout
        while not reached():
            assert self.process.poll() is None, self.tail()
            assert time.monotonic() < deadline, self.tail()
            time.sleep(pause)

    def wait(self, timeout: float) -> int:
        """Return the exit status. Kill a run that takes longer, and fail."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not done within {timeout} s:\n{self.tail()}") from None

    def kill(self) -> None:
        """Kill every process of the run."""
        end_all(self.mark, patience=0)

    def clear(self) -> None:
        """End the remaining processes of the run, and remove Ray's logs."""
        self.kill()
        end_all(self.mark, patience=10)
        self.process.wait(10)
        shutil.rmtree(self.ray_folder, ignore_errors=True)

    def tail(self, lines: int = 60) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.splitlines()[-lines:])


def start(folder: Path, data: Path, *overrides: str, steps=2, configuration="cpu", env=None) -> Run:
    """Start verl's entry point with the package's CPU configuration on the tiny model."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    # Ray's socket paths must be short, even if the path of the test's folder is long.
    ray_folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / f"ve-{mark[:8]}"
    defaults = overrides_of(folder, data, ray_folder, steps)
    command = [sys.executable, "-u", "-m", "verl.trainer.main_ppo", f"+verl_ext={configuration}"]
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(
            [*command, *defaults, *overrides],
            cwd=folder,
            env=environment_of(folder, mark) | (env or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=as_from_a_terminal,
        )
    return Run(folder, process, mark, ray_folder)


def overrides_of(folder: Path, data: Path, ray_folder: Path, steps: int) -> list[str]:
    """Return the overrides that all runs share."""
    return [
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/val.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=64",
        "data.max_response_length=16",
        f"actor_rollout_ref.model.path={data}/model",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "algorithm.adv_estimator=grpo",
        f"reward.custom_reward_function.path={tiny_model.__file__}",
        "trainer.val_before_train=False",
        "trainer.total_epochs=100",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={folder}/checkpoints",
        f"+ray_kwargs.ray_init._temp_dir={ray_folder}",
    ]


def environment_of(folder: Path, mark: str) -> dict[str, str]:
    """Return the environment of a run, with its mark and the files of its loggers."""
    return {
        **os.environ,
        MARK: mark,
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
        "HYDRA_FULL_ERROR": "1",
    }
