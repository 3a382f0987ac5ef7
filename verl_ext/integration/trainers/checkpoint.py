"""The estimators' state beside a checkpoint of verl: one JSON file, written whole or not at all."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from verl_ext import __version__
from verl_ext.core.chain import Chain
from verl_ext.core.state import RunState
from verl_ext.errors import CheckpointError
from verl_ext.files import replacing, sync_folder

logger = logging.getLogger("verl_ext")

FILE = "verl_ext.json"
FORMAT = 1


def save(folder: str | os.PathLike[str], run: RunState, *, step: int) -> Path:
    """Write the state into `folder`, atomically: a reader sees the old file or the new one."""
    path = Path(folder) / FILE
    data = {"format": FORMAT, "verl_ext": __version__, "global_step": step, "estimators": run.state_dict()}
    try:
        for left in path.parent.glob(f".{FILE}.*.tmp"):  # by a process that was killed
            left.unlink(missing_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(data, indent=2, allow_nan=False), encoding="utf-8")
    except OSError as error:  # a full disk's error names no file
        raise CheckpointError(
            f"the estimators' state of step {step} cannot be saved to {path}: {error}; the checkpoint before stays the "
            "current one, from which the run can be resumed"
        ) from error
    return path


def load(folder: str | os.PathLike[str], run: RunState, *, step: int | None = None) -> bool:
    """Read the state of `folder` into `run`; False if there is none, an error naming the file if it is damaged.

    With `step`, it must have been written at that step.
    """
    path = Path(folder) / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or not isinstance(data.get("estimators"), dict):
            raise CheckpointError("it holds no estimators")
        if data.get("format") != FORMAT:
            raise CheckpointError(f"it has format {data.get('format')!r}, this version reads {FORMAT}")
        if step is not None and data.get("global_step") != step:
            raise CheckpointError(f"it was written at step {data.get('global_step')!r}, the run resumes at {step}")
        run.load_state_dict(data["estimators"])
    except (ValueError, RecursionError, CheckpointError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error}; resume from another checkpoint, or delete the file to start the estimator's "
            "history anew on purpose"
        ) from error
    return True


def save_for(trainer: Any, run: RunState) -> None:
    """Before verl's own save, whose tracker file makes the checkpoint current.

    A run without a state takes away that of an earlier run whose checkpoint it writes over.
    """
    step = step_of(trainer)
    folder = Path(trainer.config.trainer.default_local_dir) / f"global_step_{step}"
    if any(run.states.values()):
        logger.info("saved the estimators' state to %s", save(folder, run, step=step))
    else:
        remove(folder)


def remove(folder: Path) -> None:
    """Take the state of another run away from a checkpoint that is written over."""
    path = folder / FILE
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CheckpointError(
            f"{path} is the state of another run, whose checkpoint this run writes over, and cannot be removed: "
            f"{error}; remove it, or set another trainer.default_local_dir"
        ) from error
    sync_folder(folder)
    logger.warning("removed %s: it was the state of another run, whose checkpoint this run writes over", path)


def load_for(trainer: Any, run: RunState, *, name: str, chain: Chain) -> None:
    """After verl's own load; a resumed run whose history is not there says so."""
    config = trainer.config.trainer
    if config.resume_mode == "disable" or step_of(trainer) <= 0:
        return
    if config.resume_mode == "resume_path":
        folder = Path(config.resume_from_path)
    else:
        folder = Path(config.default_local_dir) / f"global_step_{step_of(trainer)}"
    if load(folder, run, step=step_of(trainer)):
        if name not in run.states:
            logger.warning("%s holds no state of %s: its history starts anew", folder / FILE, name)
        else:
            chain.check_state(run.states[name])
            logger.info("read the estimators' state from %s", folder / FILE)
    else:
        logger.warning(
            "resuming at step %d, but %s does not exist: the history of %s starts anew in the middle of the run "
            "(the checkpoint was written by another estimator, or without verl_ext)",
            step_of(trainer),
            folder / FILE,
            name,
        )


def step_of(trainer: Any) -> int:
    """The number in the checkpoint folder's name; the fully asynchronous trainer counts weight versions."""
    version = getattr(trainer, "current_param_version", None)
    return int(trainer.global_steps if version is None else version)
