"""Save the estimators' state in verl's checkpoints, and load it: one JSON file, written atomically."""

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
from verl_ext.integration.compat.names import STEP_FOLDER

logger = logging.getLogger("verl_ext")

FILE = "verl_ext.json"
FORMAT = 1


def save(folder: str | os.PathLike[str], run: RunState, *, step: int) -> Path:
    """Write the state into `folder` atomically: a reader sees the old file or the new one."""
    path = Path(folder) / FILE
    data = {"format": FORMAT, "verl_ext": __version__, "global_step": step, "estimators": run.state_dict()}
    try:
        for left in path.parent.glob(f".{FILE}.*.tmp"):  # left by a killed process
            left.unlink(missing_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(data, indent=2, allow_nan=False), encoding="utf-8")
    except OSError as error:  # a full disk's error names no file
        raise CheckpointError(
            f"the estimators' state of step {step} cannot be saved to {path}: {error}; the previous checkpoint stays "
            "current, and the run can resume from it"
        ) from error
    return path


def load(folder: str | os.PathLike[str], run: RunState, *, step: int | None = None) -> bool:
    """Load the state in `folder` into `run`; False if there is no file. Raise if the file is damaged.

    With `step`, also raise unless the file was written at that step.
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
            raise CheckpointError("it has no section 'estimators'")
        if data.get("format") != FORMAT:
            raise CheckpointError(f"it has format {data.get('format')!r}, this version reads {FORMAT}")
        if step is not None and data.get("global_step") != step:
            raise CheckpointError(f"it was written at step {data.get('global_step')!r}, the run resumes at {step}")
        run.load_state_dict(data["estimators"])
    except (ValueError, RecursionError, CheckpointError) as error:
        raise CheckpointError(
            f"{path} is damaged: {error}; resume from another checkpoint, or delete the file to start with an empty "
            "history"
        ) from error
    return True


def save_for(trainer: Any, run: RunState) -> None:
    """Save the state before verl saves, because verl's tracker file then makes the checkpoint current.

    A run without state removes the state of an earlier run whose checkpoint it overwrites.
    """
    step = step_of(trainer)
    folder = Path(trainer.config.trainer.default_local_dir) / f"{STEP_FOLDER}{step}"
    if any(run.states.values()):
        logger.info("saved the estimators' state to %s", save(folder, run, step=step))
    else:
        remove(folder)


def remove(folder: Path) -> None:
    """Remove another run's state from a checkpoint that this run overwrites."""
    path = folder / FILE
    try:
        path.unlink()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CheckpointError(
            f"{path} is the state of another run, whose checkpoint this run overwrites, and it cannot be removed: "
            f"{error}; remove it, or set another trainer.default_local_dir"
        ) from error
    sync_folder(folder)
    logger.warning("removed %s: it was the state of another run, whose checkpoint this run overwrites", path)


def load_for(trainer: Any, run: RunState, *, name: str, chain: Chain) -> None:
    """Load the state after verl has loaded its checkpoint; log a warning if there is none to resume from."""
    config = trainer.config.trainer
    if config.resume_mode == "disable" or step_of(trainer) <= 0:
        return
    if config.resume_mode == "resume_path":
        folder = Path(config.resume_from_path)
    else:
        folder = Path(config.default_local_dir) / f"{STEP_FOLDER}{step_of(trainer)}"
    if load(folder, run, step=step_of(trainer)):
        if name not in run.states:
            logger.warning("%s has no state of %s: its history starts empty", folder / FILE, name)
        else:
            chain.check_state(run.states[name])
            logger.info("read the estimators' state from %s", folder / FILE)
    else:
        logger.warning(
            "resuming at step %d, but %s does not exist: the history of %s starts empty in the middle of the run "
            "(the checkpoint was written with another estimator, or without verl_ext)",
            step_of(trainer),
            folder / FILE,
            name,
        )


def step_of(trainer: Any) -> int:
    """The number in the checkpoint folder's name: the step, or the weights' version when fully asynchronous."""
    version = getattr(trainer, "current_param_version", None)
    return int(trainer.global_steps if version is None else version)
