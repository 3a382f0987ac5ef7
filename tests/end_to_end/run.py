"""One run of verl's own entry point in its own processes: its metrics, and what it leaves behind.

Every process of a run inherits a mark in its environment, Ray's included, and is found by it; no other Ray cluster of
the machine is touched.
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
FINDS_TESTS = {"PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}
"""For a run whose processes import a module of the tests."""
OWN_METRICS = {
    "gdpo": ("gdpo/whiten_std",),
    "dgpo": ("dgpo/balance_z", "dgpo/zero_variance_fraction", "dgpo/valid_groups"),
    "hadw": ("hadw/capability_prior", "hadw/capability_posterior", "hadw/batch_accuracy", "hadw/eta_t"),
}


def processes_of(mark: str) -> list[int]:
    """The processes whose environment carries the mark."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                alive = "\nState:\tZ" not in (entry / "status").read_text()
                if alive and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # gone meanwhile
                continue
    return found


def end_all(mark: str, patience: float = 60.0) -> list[str]:
    """Command lines of the processes with the mark that are still there after a while; they are killed.

    Ray's workers notice on their own that their node has ended. On a busy machine that can take more than 15 seconds.
    """
    deadline = time.monotonic() + patience
    while (pids := processes_of(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    left = []
    for pid in pids:
        with suppress(OSError):  # gone meanwhile
            left.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
            os.kill(pid, signal.SIGKILL)
    return left


def metrics_of(path: Path) -> dict[int, dict[str, float]]:
    """Step to metrics, from verl's file logger; a step logged twice keeps its last values."""
    steps: dict[int, dict[str, float]] = {}
    if path.exists():
        with path.open() as lines:
            for record in map(json.loads, lines):
                steps.setdefault(record["step"], {}).update(record["data"])
    return steps


def check_estimator(name: str, metrics: Mapping[int, Mapping[str, float]], steps: Iterable[int]) -> None:
    """The estimator trained in each of the steps, and logged what is its own."""
    for step in steps:
        found = metrics[step]
        assert found["actor/grad_norm"] > 0, step
        for metric in ("advantage/mean", "advantage/std", "advantage/zero_fraction", *OWN_METRICS[name]):
            assert math.isfinite(found[metric]), (step, metric)


@dataclass
class Run:
    """A started run; `wait` it out, `stop` it, and look at its `metrics`."""

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
        """A metric's values by step, where it was logged."""
        return [values[name] for _, values in sorted(self.metrics.items()) if name in values]

    def wait_until(self, reached: Callable[[], bool], timeout: float, pause: float = 0.1) -> None:
        """Return once it is so; fail where the run ends before."""
        deadline = time.monotonic() + timeout
        while not reached():
            assert self.process.poll() is None, self.tail()
            assert time.monotonic() < deadline, self.tail()
            time.sleep(pause)

    def wait(self, timeout: float) -> int:
        """The exit code; a run that takes longer is killed, and fails."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not done within {timeout} s:\n{self.tail()}") from None

    def kill(self) -> None:
        """Kill every process of the run."""
        end_all(self.mark, patience=0)

    def clear(self) -> None:
        """End what is left of the run, its own processes only, and remove Ray's own logs."""
        self.kill()
        end_all(self.mark, patience=10)
        self.process.wait(10)
        shutil.rmtree(self.ray_folder, ignore_errors=True)

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.splitlines()[-lines:])


def start(folder: Path, data: Path, *overrides: str, steps=2, configuration="cpu", env=None) -> Run:
    """Start verl's entry point with the package's CPU configuration on the tiny model."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    # Ray's socket paths must be short, whatever the test's folder is called.
    ray_folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / f"ve-{mark[:8]}"
    command = [
        sys.executable,
        "-u",
        "-m",
        "verl.trainer.main_ppo",
        f"+verl_ext={configuration}",
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
        *overrides,
    ]
    environment = {
        **os.environ,
        MARK: mark,
        "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl"),
        "TENSORBOARD_DIR": str(folder / "tensorboard"),
        "HYDRA_FULL_ERROR": "1",
        **(env or {}),
    }
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=as_from_a_terminal,
        )
    return Run(folder, process, mark, ray_folder)
