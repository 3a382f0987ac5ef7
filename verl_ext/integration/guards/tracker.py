"""Check the tracker, verl's file that names the current checkpoint, and repair an empty one before verl reads it.

verl opens the tracker with "w" after it has written the rest of the checkpoint. If the process is killed there, or the
disk is full, the file is empty, and verl fails on `int("")` when the run resumes. If the tracker names a checkpoint
that is gone, verl prints that and starts from scratch; here it is an error.

This holds for `_save_checkpoint` of the V1, legacy and fully asynchronous trainers of verl 0.9.0 and 0.9.1. Megatron's
`async_save` writes the tracker from a worker; such a tracker is not repaired.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.errors import CheckpointError
from verl_ext.files import replacing
from verl_ext.integration.compat.names import DATA, STEP_FOLDER, TRACKER

logger = logging.getLogger("verl_ext")


def repair(trainer: Any, *, state_file: str | None) -> None:
    """With `resume_mode=auto`, write the newest complete checkpoint into an empty tracker; raise if it names none.

    `state_file` is the file of the estimator's state in a checkpoint, None for an estimator without state.
    """
    config = trainer.config.trainer
    if config.resume_mode != "auto":
        return
    home = Path(config.default_local_dir)
    path = home / TRACKER
    try:
        text = path.read_bytes()
        named = home / f"{STEP_FOLDER}{int(text)}"
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; {_remedy(home)}") from error
    except ValueError as error:
        if text.strip():
            raise CheckpointError(
                f"{path} must hold the number of the current checkpoint's step, found {text!r:.80}; {_remedy(home)}"
            ) from error
    else:
        if not os.path.exists(named):  # Path.exists raises for a name that is too long
            raise CheckpointError(
                f"{path} names {named.name}, which does not exist in {home}, and verl would start from scratch; "
                f"{_remedy(home)}"
            )
        return
    if OmegaConf.select(trainer.config, "actor_rollout_ref.actor.checkpoint.async_save"):
        raise CheckpointError(
            f"{path} is empty; async_save may leave the newest checkpoint incomplete; {_remedy(home)}"
        )
    critic = ("critic",) if getattr(trainer, "use_critic", False) else ()
    step = _newest(home, ("actor", DATA, *critic, *((state_file,) if state_file else ())))
    try:
        with replacing(path) as temporary:
            temporary.write_text(str(step))
    except OSError as error:
        raise CheckpointError(
            f"{path} is empty and cannot be written: {error}; free disk space, then the run resumes at step {step}"
        ) from error
    logger.warning(
        "%s was empty: a run was killed, or its disk was full, while it wrote the file. This run resumes from the "
        "newest complete checkpoint, %s%d",
        path,
        STEP_FOLDER,
        step,
    )


def _newest(home: Path, parts: Sequence[str]) -> int:
    """The step of the checkpoint that was written last; raise unless it is also the highest step."""
    steps = []
    for folder in home.glob(f"{STEP_FOLDER}*"):
        number = folder.name.removeprefix(STEP_FOLDER)
        if number.isdecimal() and all(_filled(folder / part) for part in parts):
            steps.append(((folder / DATA).stat().st_mtime_ns, int(number)))
    if not steps:
        raise CheckpointError(
            f"{home / TRACKER} is empty, and no {STEP_FOLDER}N folder beside it has {', '.join(parts)}; {_remedy(home)}"
        )
    last, highest = max(steps)[1], max(step for _, step in steps)
    if last != highest:  # a run resumed from an earlier checkpoint, and the later ones belong to the run before
        raise CheckpointError(
            f"{home / TRACKER} is empty, and it is not clear which checkpoint is current: {STEP_FOLDER}{last} was "
            f"written last, {STEP_FOLDER}{highest} is the highest; {_remedy(home)}"
        )
    return highest


def _filled(path: Path) -> bool:
    """Whether a path is a file or a folder that is not empty."""
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0


def _remedy(home: Path) -> str:
    # verl's legacy trainers read the tracker with resume_path as well.
    return (
        "write the step to resume from into the file, or delete it and set trainer.resume_mode=resume_path "
        f"trainer.resume_from_path={home}/{STEP_FOLDER}N, or set trainer.resume_mode=disable to start from scratch"
    )
