"""verl's tracker, the file that names the current checkpoint: read before verl does, and mended where it is empty.

It may also name a checkpoint that is gone; verl prints that, and starts anew.

verl opens it with "w", after all else of the checkpoint is written: a process killed there, or a disk that is full,
leaves it empty, and verl then fails on `int("")`. True of `_save_checkpoint` of the V1, the legacy and the fully
asynchronous trainer of verl 0.9.0 and 0.9.1; Megatron's `async_save` writes it from a worker, and is not mended.
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
from verl_ext.integration.compat.names import STEP_FOLDER, TRACKER

logger = logging.getLogger("verl_ext")

DATA = "data.pt"
"""What every trainer of verl writes into a checkpoint after the model."""


def mend(trainer: Any, *, state_file: str | None) -> None:
    """With `resume_mode=auto`: an empty tracker gets the newest whole checkpoint, one that names none is an error.

    `state_file` is what a whole checkpoint holds of the estimator's state, None for an estimator without one.
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
                f"{path} names the current checkpoint, expected the number of its step, found {text!r:.80}; "
                f"{_remedy(home)}"
            ) from error
    else:
        if not os.path.exists(named):  # Path.exists raises for a name that is too long
            raise CheckpointError(
                f"{path} names {named.name}, which is not beside it, and verl would start anew; {_remedy(home)}"
            )
        return
    if OmegaConf.select(trainer.config, "actor_rollout_ref.actor.checkpoint.async_save"):
        raise CheckpointError(f"{path} is empty, and with async_save the newest may not be whole; {_remedy(home)}")
    critic = ("critic",) if getattr(trainer, "use_critic", False) else ()
    step = _newest(home, ("actor", DATA, *critic, *((state_file,) if state_file else ())))
    try:
        with replacing(path) as temporary:
            temporary.write_text(str(step))
    except OSError as error:
        raise CheckpointError(
            f"{path} is empty and cannot be written: {error}; make room, then the run resumes at step {step}"
        ) from error
    logger.warning(
        "%s was empty: a run was killed, or had no room, as it wrote it; its newest whole checkpoint is %s%d, "
        "from which this run resumes",
        path,
        STEP_FOLDER,
        step,
    )


def _newest(home: Path, parts: Sequence[str]) -> int:
    """The step of the checkpoint that was written last, if that is the highest too."""
    steps = []
    for folder in home.glob(f"{STEP_FOLDER}*"):
        number = folder.name.removeprefix(STEP_FOLDER)
        if number.isdecimal() and all(_filled(folder / part) for part in parts):
            steps.append(((folder / DATA).stat().st_mtime_ns, int(number)))
    if not steps:
        raise CheckpointError(
            f"{home / TRACKER} is empty, and no {STEP_FOLDER}N beside it holds {', '.join(parts)}; {_remedy(home)}"
        )
    last, highest = max(steps)[1], max(step for _, step in steps)
    if last != highest:  # an earlier one was resumed from, and the later ones are of the run before
        raise CheckpointError(
            f"{home / TRACKER} is empty, and it is not clear which checkpoint is current: {STEP_FOLDER}{last} was "
            f"written last, {STEP_FOLDER}{highest} is the highest; {_remedy(home)}"
        )
    return highest


def _filled(path: Path) -> bool:
    """Whether a file or a folder is there and holds something."""
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0


def _remedy(home: Path) -> str:
    # verl's legacy trainers read it with resume_path too.
    return (
        "write the step to resume from into the file, or delete it and set trainer.resume_mode=resume_path "
        f"trainer.resume_from_path={home}/{STEP_FOLDER}N, or trainer.resume_mode=disable to start anew"
    )
