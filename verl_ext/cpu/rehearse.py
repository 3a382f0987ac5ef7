"""`verl-ext rehearse`: train, save, resume and validate a scaled-down copy of a run on the CPU, and report each stage.

It takes the arguments of `python -m verl.trainer.main_ppo`, and runs verl's pipeline with the user's data, tokenizer,
tools, reward function and estimator. The models are small and have random weights. The report is made from verl's log
and metrics, which are kept in the folder `rehearsal` of `trainer.default_local_dir`. The exit status is 1 if a stage
failed.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from omegaconf import OmegaConf

from verl_ext.checks.command import check
from verl_ext.checks.configuration import composed
from verl_ext.cpu import progress, session
from verl_ext.cpu.miniature import make_model, scale_down_run
from verl_ext.cpu.report import (
    ERROR,
    NOTE,
    OK,
    STEPS,
    FinishedRun,
    Line,
    counted,
    report_prompt,
    report_responses,
    report_resumed_run,
    report_settings,
    report_tools,
    report_training,
)
from verl_ext.errors import ConfigurationError, explaining_errors
from verl_ext.files import METRICS, say

MARKER = "verl_ext.rehearsal"
"""A file in the folder of a rehearsal. A folder that contains it may be emptied. It is locked during a rehearsal."""


def rehearse(options: argparse.Namespace) -> int:
    """Check the run, rehearse it unless it is rejected, and print a line for each stage; return 1 if one failed."""
    deadline = time.monotonic() + 60 * options.minutes
    check_options = argparse.Namespace(**vars(options), try_reward=options.rows > 0, strict=False)
    if check(check_options, deadline=deadline):
        return 1
    states = []
    for stage, state, text in run_stages(options, deadline):
        say(f"{state:5}  {stage}: {text}")
        states.append(state)
    failed = ERROR in states
    result = "failed" if failed else "passed"
    say(f"The rehearsal {result}. The lines above contain {counted(states.count(NOTE), 'note')}.")
    return int(failed)


def run_stages(options: argparse.Namespace, deadline: float) -> Iterator[Line]:
    """Prepare the rehearsal, run it uninterrupted and resumed, and yield the lines of the report as they are known."""
    rehearsal = prepare(options)
    user, config, folder = rehearsal.user, rehearsal.config, rehearsal.folder
    has_responses = options.responses is not None
    template = user.actor_rollout_ref.model.get("custom_chat_template") or rehearsal.tokenizer.chat_template
    yield from report_settings(user, rehearsal.left_out)
    yield from report_tools(user, template, has_responses=has_responses)
    if options.rows > 0:
        yield from report_prompt(user, rehearsal.tokenizer, template)
    yield "runs", OK, f"Two runs follow, of a few minutes each. Their logs are in {folder}."
    with rehearsal.lock:
        uninterrupted = run_verl(folder / "train", config, deadline)
        yield from report_training(uninterrupted, user, has_responses=has_responses)
        yield from report_responses(uninterrupted, user, has_responses=has_responses)
        if uninterrupted.is_complete:
            config.trainer.update(test_freq=STEPS, resume_mode="resume_path")
            config.trainer.resume_from_path = str(uninterrupted.folder / "checkpoints/global_step_2")
            resumed = run_verl(folder / "resume", config, deadline)
            yield from report_resumed_run(resumed, uninterrupted, user, has_responses=has_responses)


class Rehearsal(NamedTuple):
    """What a rehearsal needs before its first run."""

    user: Any
    """The configuration of the user's run."""
    config: Any
    """The configuration of the rehearsal."""
    left_out: list[str]
    """The settings of the user's run that the rehearsal leaves out."""
    tokenizer: Any
    folder: Path
    lock: TextIO
    """The locked marker of the folder."""


def prepare(options: argparse.Namespace) -> Rehearsal:
    """Compose the user's configuration, scale it down, and write the small models to an empty folder."""
    with composed(options) as user:
        from verl.trainer.ppo.utils import need_critic

        folder = Path(user.trainer.default_local_dir).resolve() / "rehearsal"
        lock = empty_and_lock(folder)
        tokenizer = make_model(user, "actor_rollout_ref.model", folder / "model")
        if need_critic(user):
            make_model(user, "critic.model", folder / "critic")
        config, left_out = scale_down_run(user, folder, options.responses)
    return Rehearsal(user, config, left_out, tokenizer, folder, lock)


def empty_and_lock(folder: Path) -> TextIO:
    """Empty the folder of the last rehearsal; return its marker, which is locked until it is closed.

    Raise if the folder was not created by a rehearsal, or if another rehearsal is running in it.
    """
    fix = "Set trainer.default_local_dir to a folder that can be written."
    with explaining_errors(f"The folder {folder} of trainer.default_local_dir", ConfigurationError, "written", fix):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not (folder / MARKER).exists():
            raise ConfigurationError(
                f"{folder} was not created by rehearse and would be deleted. Move it, or set another "
                "trainer.default_local_dir."
            )
        lock = (folder / MARKER).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ConfigurationError(
                f"Another rehearsal is running in {folder}. Wait for its end, or set another trainer.default_local_dir."
            ) from None
        for name in ("model", "critic", "train", "resume"):
            if (folder / name).exists():
                shutil.rmtree(folder / name)
    return lock


def run_verl(folder: Path, config: Any, deadline: float) -> FinishedRun:
    """Start verl's entry point with this configuration, and wait for its end, at most until the deadline."""
    folder.mkdir()
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    variables.update({"VERL_FILE_LOGGER_PATH": str(folder / METRICS), progress.FOLDER_VARIABLE: str(folder)})
    config.trainer.default_local_dir = str(folder / "checkpoints")
    OmegaConf.save(config, folder / "run.yaml")
    command = [sys.executable, "-u", "-m", "verl.trainer.main_ppo", f"--config-path={folder}", "--config-name=run"]
    command += [f"hydra.run.dir='{folder}'", "hydra.output_subdir=null"]
    # The driver gets the variables of the workers as well.
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    begin = time.monotonic()
    with (folder / "log.txt").open("w") as log:
        status = session.run(command, deadline - begin, stdout=log, stderr=log, env=environment)
    return FinishedRun(folder, status, time.monotonic() - begin)
