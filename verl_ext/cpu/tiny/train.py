"""Train on a tiny task with verl's own entry point, without an accelerator."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from verl_ext import registry
from verl_ext.core.typed import number
from verl_ext.cpu.tiny.make import made
from verl_ext.cpu.tiny.task import Task
from verl_ext.cpu.tiny.tasks import task_named
from verl_ext.errors import ConfigurationError, VerlExtError, unknown
from verl_ext.estimators import build
from verl_ext.files import replacing
from verl_ext.settings import Settings

ESTIMATORS = ("grpo", *(name for name in registry.ESTIMATORS if name != "compose"))
"""verl's own grpo, and our estimators except compose, which has no default list of steps."""
ROLLOUTS = ("embedded", "vllm")
METRICS, LOG, CHECKPOINTS, FINISHED = "metrics.jsonl", "log.txt", "checkpoints", "finished.json"
VERL = "verl.trainer.main_ppo"
PATIENCE = 30.0
"""Seconds to wait for verl and Ray to end after an interrupt, before they are killed."""


class TrainingError(VerlExtError, RuntimeError):
    """verl ended before its last step."""


@dataclass(frozen=True)
class Training:
    """What to train."""

    task: str
    estimator: str
    steps: int = 50
    seed: int = 1
    ranks: int = 1
    rollout: str = "embedded"

    def __post_init__(self) -> None:
        task_named(self.task)
        for what, valid in (("estimator", ESTIMATORS), ("rollout", ROLLOUTS)):
            if getattr(self, what) not in valid:
                raise ConfigurationError(unknown(what, getattr(self, what), valid))
        for what in ("steps", "ranks"):
            number(what, getattr(self, what), low=1)

    @property
    def name(self) -> str:
        """A name for the run's folder; equal settings give equal names.

        >>> Training("tools", "gdpo", seed=3, ranks=2).name
        'tools-gdpo-50steps-seed3-2ranks'
        """
        extra = f"-{self.ranks}ranks" * (self.ranks != 1) + f"-{self.rollout}" * (self.rollout != "embedded")
        return f"{self.task}-{self.estimator}-{self.steps}steps-seed{self.seed}{extra}"


def quoted(path: Path | str) -> str:
    r"""A path quoted as a value of a Hydra override; brackets, commas and non-ASCII letters need that.

    >>> quoted("/runs (new)/it's")
    "'/runs (new)/it\\'s'"
    """
    if "${" in str(path):
        raise ConfigurationError(f"{path} contains '${{', which Hydra reads as a reference: choose another folder")
    # Hydra reads a backslash as an escape only before a quote.
    return "'" + re.sub(r"(\\*)('|$)", lambda match: 2 * match[1] + match[2].replace("'", "\\'"), str(path)) + "'"


def overrides(training: Training, data: Path, run: Path) -> list[str]:
    """The arguments of `verl.trainer.main_ppo`."""
    task = task_named(training.task)
    presets = ["cpu", *(["vllm"] if training.rollout == "vllm" else [])]
    if training.estimator != "grpo":
        presets.append(training.estimator)
    return [
        f"+verl_ext=[{','.join(presets)}]",
        f"algorithm.adv_estimator={training.estimator}",
        f"++algorithm.rewards.keys=[{','.join(task.keys)}]",
        *_accuracy(training.estimator, task),
        f"reward.custom_reward_function.path=pkg://{task.reward}",
        f"data.train_files={quoted(data / 'train.parquet')}",
        f"data.val_files={quoted(data / 'val.parquet')}",
        "data.train_batch_size=16",
        f"data.max_prompt_length={task.prompt_length}",
        f"data.max_response_length={task.response_length}",
        f"data.seed={training.seed}",
        f"actor_rollout_ref.model.path={quoted(data / 'model')}",
        "actor_rollout_ref.rollout.n=8",
        f"actor_rollout_ref.rollout.seed={training.seed}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        # One update a batch: the rollout's log-probabilities are, up to rounding, those of the policy that is updated.
        "algorithm.rollout_correction.bypass_mode=True",
        f"actor_rollout_ref.actor.optim.lr={task.learning_rate}",
        f"actor_rollout_ref.actor.data_loader_seed={training.seed}",
        "trainer.val_before_train=False",
        "trainer.total_epochs=1000",
        f"trainer.total_training_steps={training.steps}",
        f"trainer.save_freq={training.steps}",
        f"trainer.n_gpus_per_node={training.ranks}",
        f"trainer.project_name={training.task}",
        f"trainer.experiment_name={training.name}",
        f"trainer.default_local_dir={quoted(run / CHECKPOINTS)}",
        # More threads gain nothing on a model of this size.
        "++ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS='1'",
    ]


def _accuracy(estimator: str, task: Task) -> list[str]:
    """The accuracy settings, for an estimator that uses accuracy."""
    if estimator not in registry.ESTIMATORS or not build(estimator, Settings()).needs_accuracy:
        return []
    settings = ["algorithm.rewards.accuracy_key=correctness"]
    if task.accuracy_threshold is not None:
        settings.append(f"algorithm.rewards.accuracy_threshold={task.accuracy_threshold}")
    return settings


def train(
    training: Training,
    data: Path,
    run: Path,
    *,
    more: Sequence[str] = (),
    show: Callable[[str], object] = str,
) -> bool:
    """Train in the folder `run` unless that is done already; return whether it trained. `show` gets the progress bar.

    A run that was interrupted, or had other settings, starts from scratch. However this call ends, it ends all of
    verl's processes.
    """
    data, run = data.resolve(), run.resolve()
    task = made(data)
    if task is None or task["recipe"]["task"] != training.task:
        raise ConfigurationError(
            f"{data} is not the tiny task {training.task!r}: make it by `python scripts/make_tiny_task.py "
            f"{training.task} --folder {data}`"
        )
    given = [*overrides(training, Path("DATA"), Path("RUN")), *more]  # the same wherever the folders are
    settings = {**asdict(training), "data": task["recipe"], "overrides": given}
    finished = run / FINISHED
    if finished.is_file() and json.loads(finished.read_text(encoding="utf-8")) == settings:
        return False
    # Ray's sockets need a short path, and the run's folder may have a long one.
    with _clean_folder(run) as log, tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch:
        arguments = [*overrides(training, data, run), f"+ray_kwargs.ray_init._temp_dir={quoted(scratch)}", *more]
        command = [sys.executable, "-u", "-m", VERL, *arguments]
        environment = {
            **os.environ,
            "VERL_FILE_LOGGER_PATH": str(run / METRICS),
            "TENSORBOARD_DIR": str(run / "tensorboard"),
        }
        log.write(shlex.join(command) + "\n")
        log.flush()
        with _process(command, run, environment) as process:
            assert process.stdout is not None  # noqa: S101 - for the type checker: it is a pipe
            for bar in _bars(process.stdout, log):
                show(bar)
            status = process.wait()
        log.flush()
        if status != 0:
            raise TrainingError(f"verl ended with status {status}; the end of {run / LOG}:\n{_tail(run / LOG)}")
        with replacing(finished) as unfinished:
            unfinished.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return True


@contextmanager
def _clean_folder(run: Path) -> Iterator[IO[str]]:
    """Remove an earlier run from the folder and open its log; raise if it is not a run's folder, or in use."""
    if run.exists() and (not run.is_dir() or (any(run.iterdir()) and not _is_run(run))):
        raise ConfigurationError(
            f"{run} is not a run of a tiny task (it has no {LOG} that begins with the command), so it is not "
            "overwritten: choose another folder, or a new one in it"
        )
    run.mkdir(parents=True, exist_ok=True)
    with open(run / LOG, "a", encoding="utf-8") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when this process ends
        except BlockingIOError:
            raise ConfigurationError(
                f"another process trains in {run}: wait for it to end, or choose another folder"
            ) from None
        (run / FINISHED).unlink(missing_ok=True)  # first, because a partly removed run is not finished
        for path in run.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != LOG:
                path.unlink()
        log.truncate(0)
        yield log


def _is_run(folder: Path) -> bool:
    """Whether `train` made the folder: its log begins with the command, or is empty after an early kill."""
    path = folder / LOG
    if not path.is_file():
        return False
    with open(path, encoding="utf-8", errors="replace") as log:
        first = log.readline()
    return not first or f" -m {VERL} " in first


def checkpoint(run: Path) -> Path | None:
    """The folder of a run's last checkpoint; None if overrides turn saving off, or save elsewhere."""
    tracker = run / CHECKPOINTS / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return None
    return tracker.parent / f"global_step_{tracker.read_text(encoding='utf-8').strip()}"


@contextmanager
def _process(command: Sequence[str], folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a process in its own session, so that only we interrupt it, and only once."""
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                previous[number] = signal.signal(number, lambda number, _: sys.exit(128 + number))
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # As in a script's background. verl would inherit this, and the interrupt below would have no effect.
            previous[signal.SIGINT] = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        process = subprocess.Popen(  # noqa: S603
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                try:
                    process.communicate(timeout=PATIENCE)
                except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _bars(output: IO[str], log: IO[str]) -> Iterator[str]:
    """Write the output to the log and yield its progress bars; in text mode a carriage return ends a line."""
    for line in output:
        log.write(line)
        if line.startswith("Training Progress"):
            yield line.rstrip()


def _tail(path: Path, lines: int = 30) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
