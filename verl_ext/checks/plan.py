"""Tell from the configuration, the data and the checkpoints on this machine what a run will do, for `check`."""

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
from verl_ext.errors import ConfigurationError, Finding, reading
from verl_ext.run import Run
from verl_ext.run_config import FUNCTION, select

ROLLOUT = "actor_rollout_ref.rollout"
TOOLS = tuple(f"{ROLLOUT}.multi_turn.{name}" for name in ("tool_config_path", "function_tool_path"))
FILES = (
    *("data.train_files", "data.val_files", f"{FUNCTION}.path", "data.custom_cls.path", *TOOLS),
    *(f"{ROLLOUT}.multi_turn.interaction_config_path", f"{ROLLOUT}.agent.agent_loop_config_path"),
)
"""Settings that name files; so does `actor_rollout_ref.model.path`, unless it is a name on a hub."""


def plan(run: Run) -> tuple[list[str], list[Finding]]:
    """Return lines about the start, the steps, the checkpoints and the validation of a run, and findings."""
    trainer = run.config.trainer
    findings: list[Finding] = []
    step = 0
    start = "from the beginning"
    if (folder := _resumed(trainer)) is not None:
        step = int(folder.rpartition("global_step_")[2])
        start = f"resumes after step {step} from {folder}"
    batch_size = run.config.data.train_batch_size
    rows = _rows(run.config)
    row_count = "all" if rows is None else f"{rows:,}"
    length = [f"{trainer.total_epochs} epochs of {row_count} rows with batch size {batch_size}"]
    step_limits = [] if rows is None else [rows // batch_size * trainer.total_epochs]
    if trainer.total_training_steps is not None:
        length.append(f"trainer.total_training_steps={trainer.total_training_steps}")
        step_limits.append(trainer.total_training_steps)
    never = "never (trainer.val_only=True)"
    steps = f"to step {min(step_limits):,}: " if step_limits else ""
    trains = never if run.only_validates else f"{steps}{', '.join(length)}"
    if rows is not None and rows < batch_size:
        text = f"data.train_files has {rows} rows, fewer than the batch size data.train_batch_size={batch_size}."
        findings.append(Finding("warning", text, f"Lower data.train_batch_size to at most {rows}, or add rows."))
    elif step_limits and step >= min(step_limits) and not run.only_validates:
        text = f"The run resumes after step {step} of {min(step_limits)}, so no step remains to be trained."
        fix = "Set trainer.resume_mode=disable, or another trainer.default_local_dir."
        findings.append(Finding("warning", text, fix))
    saves = f"never (trainer.save_freq={trainer.save_freq})"
    if run.only_validates:
        saves = never
    elif trainer.save_freq > 0:
        saves = f"every {trainer.save_freq} steps and after the last, to {trainer.default_local_dir}"
        kept = trainer.get("max_actor_ckpt_to_keep")
        saves += "" if kept is None else f"; keeps the last {kept}"
    times = ["before the first step"] if trainer.get("val_before_train", True) else []
    if trainer.test_freq > 0 and not run.only_validates:
        times.append(f"every {trainer.test_freq} steps and after the last")
    files = ", ".join(files_of(run.config, "data.val_files"))
    validates = f"{' and '.join(times)}, on {files}" if times and files else "never"
    for path, setting in _missing(run.config):
        text = f"{path}, named by {setting}, does not exist on this machine."
        fix = "Correct the path, or run the check on the machine that has it."
        findings.append(Finding("note", text, fix))
    lines = [f"start      {start}", f"trains     {trains}", f"saves      {saves}", f"validates  {validates}"]
    return lines, findings


def _resumed(trainer: Any) -> str | None:
    """Return the checkpoint from which a run resumes, or None."""
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "resume_path":
        path = str(trainer.resume_from_path)
        if not re.search(r"global_step_\d+$", path):
            raise ConfigurationError(
                f"trainer.resume_from_path={path} does not end with global_step_N. Set it to the folder of one "
                "checkpoint."
            )
        return path
    with redirect_stdout(io.StringIO()), reading("trainer.default_local_dir", ConfigurationError):
        latest: str | None = find_latest_ckpt_path(trainer.default_local_dir)
    return latest


def _rows(config: Any) -> int | None:
    """Return the number of rows of the training data before filtering; None if it is not known."""
    with suppress(OSError, ValueError):
        rows: int = sum(batches(path, [])[0] for path in files_of(config, "data.train_files"))
        most = select(config, "data.train_max_samples") or -1
        return min(rows, most) if most > 0 else rows
    return None


def _missing(config: Any) -> Iterator[tuple[str, str]]:
    """Yield each file and module that does not exist on this machine, and the setting or file that names it."""
    model = str(select(config, "actor_rollout_ref.model.path"))
    settings = [*FILES, *(["actor_rollout_ref.model.path"] if model.startswith(("/", ".", "~")) else [])]
    settings += ["trainer.resume_from_path"] if config.trainer.resume_mode == "resume_path" else []
    for setting in settings:
        for path in files_of(config, setting):
            if "://" not in path and not Path(path).exists():  # verl does not expand `~`
                yield path, setting
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
                    yield module, path
