"""What a run will do, as its configuration and this machine say it: a block of what `check` prints."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.checks.samples import batches, files_of
from verl_ext.errors import ConfigurationError, reading
from verl_ext.run_config import FUNCTION, RunConfig, select

ROLLOUT = "actor_rollout_ref.rollout"
TOOLS = tuple(f"{ROLLOUT}.multi_turn.{name}" for name in ("tool_config_path", "function_tool_path"))
FILES = (
    *("data.train_files", "data.val_files", f"{FUNCTION}.path", "data.custom_cls.path", *TOOLS),
    *(f"{ROLLOUT}.multi_turn.interaction_config_path", f"{ROLLOUT}.agent.agent_loop_config_path"),
)
"""Settings that name files; so does `actor_rollout_ref.model.path`, unless it is a name on a hub."""


def plan(run: RunConfig) -> tuple[list[str], list[str]]:
    """A line for each: where a run starts, its steps, when it saves and validates, what is missing; and warnings."""
    trainer, data, step, warnings = run.config.trainer, run.config.data, 0, list[str]()
    lines = ["start      from the beginning"]
    if (folder := _resumed(trainer)) is not None:
        step = int(folder.rpartition("global_step_")[2])
        lines = [f"start      after step {step}, from {folder}"]
    rows = _rows(run.config)
    counted = "the" if rows is None else f"{rows:,}"
    words = [f"{trainer.total_epochs} epochs of {counted} rows in batches of {data.train_batch_size}"]
    counts = [] if rows is None else [rows // data.train_batch_size * trainer.total_epochs]
    if trainer.total_training_steps is not None:
        words.append(f"trainer.total_training_steps={trainer.total_training_steps}")
        counts.append(trainer.total_training_steps)
    never = "never: trainer.val_only=True"
    trains = f"{f'to step {min(counts):,}: ' if counts else ''}{', '.join(words)}"
    lines.append(f"trains     {never if run.only_validates else trains}")
    if rows is not None and rows < data.train_batch_size:
        warnings.append(f"data.train_files has {rows} rows, fewer than data.train_batch_size={data.train_batch_size}")
    elif counts and step >= min(counts) and not run.only_validates:
        advice = "set trainer.resume_mode=disable, or another trainer.default_local_dir"
        warnings.append(f"nothing is left to train after step {step}, of {min(counts)}: {advice}")
    kept = trainer.get("max_actor_ckpt_to_keep")
    saves = f"every {trainer.save_freq} steps and after the last, to {trainer.default_local_dir}"
    saves += "" if kept is None else f", and keeps the last {kept}"
    if trainer.save_freq <= 0:
        saves = f"never: trainer.save_freq={trainer.save_freq}"
    lines.append(f"saves      {never if run.only_validates else saves}")
    times = ["before the first step"] if trainer.get("val_before_train", True) else []
    if trainer.test_freq > 0 and not run.only_validates:
        times.append(f"every {trainer.test_freq} steps and after the last")
    files = ", ".join(files_of(run.config, "data.val_files"))
    lines.append(f"validates  {' and '.join(times)}, on {files}" if times and files else "validates  never")
    if missing := [*_missing(run.config)]:
        lines.append(f"missing    {', '.join(missing)}: not on this machine")
    return lines, warnings


def _resumed(trainer: Any) -> str | None:
    """The checkpoint from which a run goes on."""
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "resume_path":
        path = str(trainer.resume_from_path)
        if not re.search(r"global_step_\d+$", path):
            raise ConfigurationError(f"trainer.resume_from_path={path} does not end with global_step_N")
        return path
    with redirect_stdout(io.StringIO()), reading("trainer.default_local_dir", ConfigurationError):
        latest: str | None = find_latest_ckpt_path(trainer.default_local_dir)
    return latest


def _rows(config: Any) -> int | None:
    """The rows of the training data, before any are left out; None where that is not known."""
    with suppress(OSError, ValueError):
        rows: int = sum(batches(path, [])[0] for path in files_of(config, "data.train_files"))
        most = select(config, "data.train_max_samples") or -1
        return min(rows, most) if most > 0 else rows
    return None


def _missing(config: Any) -> Iterator[str]:
    """What is not on this machine, with the setting that names it."""
    model = str(select(config, "actor_rollout_ref.model.path"))
    settings = [*FILES, *(["actor_rollout_ref.model.path"] if model.startswith(("/", ".", "~")) else [])]
    settings += ["trainer.resume_from_path"] if config.trainer.resume_mode == "resume_path" else []
    for setting in settings:
        for path in files_of(config, setting):
            if "://" not in path and not Path(path).exists():  # verl does not expand `~`
                yield f"{path} ({setting})"
    for path in filter(lambda path: Path(path).is_file(), files_of(config, TOOLS[0])):
        with reading(f"{TOOLS[0]}={path}", ConfigurationError):
            tools: Any = OmegaConf.load(path)
            for tool in tools.get("tools") or ():
                module, name = f"{tool.class_name}".rpartition(".")[0], ""
                try:
                    name = "" if find_spec(module) else module
                except ModuleNotFoundError as error:
                    name = str(error.name)
                if name:
                    yield f"{module} ({path})"
