"""Save an estimator's state in verl's checkpoints, and load it: one JSON file, written whole or not at all."""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_ext import __version__
from verl_ext.core.chain import plain_state
from verl_ext.errors import CheckpointError, reading
from verl_ext.files import replacing, sync_folder
from verl_ext.integration.run import Run

logger = logging.getLogger("verl_ext")

FILE = "verl_ext.json"
TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file that names the current checkpoint; verl writes it last."""
STEP_FOLDER = "global_step_"
DATA = "data.pt"
"""The file that every trainer of verl writes into a checkpoint after the model and before the tracker."""
QUEUE = "transfer_queue"
"""The folder of answers under way, which verl's asynchronous trainers write after `data.pt`."""


@contextmanager
def saving(run: Run) -> Iterator[None]:
    """Write the state of a run of ours into the checkpoint that verl writes in the block.

    An earlier run's `data.pt` and queue are put aside, so that a kill leaves no mixture of two runs. If the block
    raises, they come back only if no other file has changed and no other rank can still write.
    """
    folder = _folder(run)
    path, data = folder / FILE, folder / DATA
    state = plain_state(run.state) if run.state else None
    overwrites, had_state, before = folder.is_dir(), path.exists(), None
    aside: dict[Path, Path] = {}
    try:
        for old in filter(Path.exists, (data, path, folder / QUEUE)):
            _remove(_aside(old))  # of a save that was killed
            aside[old] = old.rename(_aside(old))
        sync_folder(folder)
        if state is not None:
            content = {
                "verl_ext": __version__,
                "global_step": run.step,
                "overwrites": overwrites,
                "computed_at": run.computed_at,
                "estimator": run.name,
                "accuracy": run.accuracy,
                "state": state,
            }
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(content, indent=2, allow_nan=False), encoding="utf-8")
            logger.info("saved the state of %s to %s", run.name, path)
        before = _files(folder)
        yield
    except Exception as error:
        if before is not None and data not in aside:
            raise
        why = str(error).rpartition("\n")[2]  # a worker's traceback ends with it
        left = "the folder may hold files of two runs: resume from another checkpoint"
        if before is None or (run.trainer.actor_rollout_wg.world_size == 1 and before == _files(folder)):
            left = "nothing was overwritten, its model is there: a run can resume from it as before"
            if not had_state:
                path.unlink(missing_ok=True)
            for old, kept in reversed(aside.items()):  # `data.pt` last: with it the checkpoint is whole
                kept.rename(old)
        raise CheckpointError(f"step {run.step} cannot be saved to {folder}: {why:.200}; {left}") from error
    for stale in folder.glob(f".{FILE}.*.tmp"):
        _remove(stale)


def remove_earlier_state(trainer: Any) -> None:
    """Remove the state of an earlier run from the checkpoint that a run without a state of its own overwrites.

    Otherwise the earlier run would resume with its old history and the new model. Call this function before verl
    writes: if the save is killed, the history starts empty, which is logged.
    """
    try:
        home, step = trainer.config.trainer.default_local_dir, trainer.global_steps
        path = Path(home) / f"{STEP_FOLDER}{step}" / FILE
    except (AttributeError, TypeError):  # a trainer of another package that saves elsewhere
        return
    try:
        path.unlink()
    except OSError as error:
        if os.path.isfile(path):  # `Path.is_file` raises for a folder that cannot be searched
            raise CheckpointError(
                f"{path} is the state of an earlier run, whose checkpoint this save overwrites, and it cannot be "
                f"removed: {error.strerror}. Make the folder writable, or set another trainer.default_local_dir"
            ) from error
        return
    sync_folder(path.parent)
    logger.info("removed %s, the state of an earlier run: this save overwrites its checkpoint", path)


def _aside(old: Path) -> Path:
    """Return where a part of an earlier run's checkpoint is while it is overwritten."""
    return old.with_name(f".{FILE}.{old.name}.tmp")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return size and time of each file. Each is opened, so that a network file system asks its server."""
    found = {}
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
        found[path] = stat.st_size, stat.st_mtime_ns
    return found


def load(run: Run) -> None:
    """Load the state after verl has loaded its checkpoint; raise if the run cannot go on with it.

    Log a warning if the checkpoint has none.
    """
    config = run.trainer.config.trainer
    if config.resume_mode == "disable" or run.step <= 0:
        return
    run.start = run.step
    folder = Path(config.resume_from_path) if config.resume_mode == "resume_path" else _folder(run)
    if run.chain is not None and _aside(folder / DATA).exists() and not (folder / DATA).exists():
        raise CheckpointError(f"{folder} may hold files of two runs, a save over it failed: resume from another one")
    if run.chain is None or not run.chain.stateful:
        return
    path = folder / FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        if data["overwrites"] and not (folder / DATA).exists():
            raise CheckpointError(f"{DATA} is missing beside it: a run was killed while it overwrote this checkpoint")
        _require_fitting(data, run)
        run.chain.check_state(data["state"])
        run.state, run.accuracy = data["state"], data["accuracy"]
        run.computed_at = run.step  # not that of the file, which may be one step behind: see `_require_fitting`
    except FileNotFoundError:
        logger.warning(
            "resuming at step %d, but %s does not exist: the history of %s starts empty in the middle of the run",
            *(run.step, path, run.name),
        )
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, CheckpointError) as error:
        reason = str(error) if isinstance(error, CheckpointError) else f"it cannot be read: {error!r:.200}"
        raise CheckpointError(
            f"{path}: {reason}. Resume with the settings that wrote it, or from another checkpoint; or delete the "
            "file: the history then starts empty"
        ) from error
    logger.info("read the state of %s from %s: its history goes on", run.name, path)


def _folder(run: Run) -> Path:
    """Return the folder of verl's checkpoint at the step of a run."""
    return Path(run.trainer.config.trainer.default_local_dir) / f"{STEP_FOLDER}{run.step}"


def _require_fitting(data: Any, run: Run) -> None:
    """Raise if a file's state is not the one from which the run goes on.

    The state may be one step older than its checkpoint: a trainer that counts its step before its last save, as
    verl-recipe's DAPO does, saves the model of step N as step N + 1.
    """
    step, computed_at = run.step, data["computed_at"]
    if data["global_step"] != step:
        raise CheckpointError(f"it was written at step {data['global_step']!r}, the run resumes at step {step}")
    if data["estimator"] != run.name:
        raise CheckpointError(f"it holds the state of {data['estimator']}, this run is {run.name}")
    if computed_at < step - 1:
        raise CheckpointError(f"its state was computed at step {computed_at}, its checkpoint is that of step {step}")
    if data["accuracy"] is not None:
        key, settings = data["accuracy"]["key"], run.settings.rewards
        now = {"key": settings.accuracy_key or key, "threshold": settings.accuracy_threshold}
        require_same_accuracy(data["accuracy"], now)


def require_same_accuracy(saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """Raise if a run that began with one accuracy would go on with another one."""
    if saved is not None and saved != now:
        raise CheckpointError(
            f"the accuracy was {saved['key']!r} with threshold {saved['threshold']} in earlier batches or in the saved "
            f"history, and is {now['key']!r} with threshold {now['threshold']} now. Set "
            f"algorithm.rewards.accuracy_key={saved['key']}; if none was set, the reward function must return the same "
            "names for every batch"
        )


def check_tracker(run: Run) -> None:
    """Raise if a run would resume from a tracker that names no whole checkpoint; verl itself may begin anew.

    A process that was killed while it saved, or a full disk, leaves an empty tracker or half of a checkpoint.
    """
    config = run.trainer.config.trainer
    home = Path(config.default_local_dir)
    path = home / TRACKER
    if run.chain is None or config.resume_mode != "auto" or not path.exists():
        return
    with reading(f"{path}, the file with the step to resume from,", CheckpointError):
        text = path.read_text(errors="replace").strip()
    if text.isdecimal() and (home / f"{STEP_FOLDER}{text}" / DATA).is_file():
        return
    whole = sorted((file.stat().st_mtime, file.parent.name) for file in home.glob(f"{STEP_FOLDER}*/{DATA}"))
    newest = f"the newest whole checkpoint is {whole[-1][1]}" if whole else "there is no whole checkpoint"
    raise CheckpointError(
        f"{path} says {text[:20]!r}, which names no whole checkpoint; {newest}. Write the step to resume from into the "
        "file, or set trainer.resume_mode=disable to start from scratch"
    )
