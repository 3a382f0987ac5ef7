"""Save an estimator and its state in verl's checkpoints, and load it: one JSON file, written whole or not at all."""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_ext import __version__
from verl_ext.core.chain import Chain, plain_state
from verl_ext.errors import CheckpointError, reading
from verl_ext.files import replacing, sync_folder
from verl_ext.run import Run

logger = logging.getLogger("verl_ext")

FILE = "verl_ext.json"
TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file that names the current checkpoint; verl writes it last."""
STEP_FOLDER = "global_step_"
DATA = "data.pt"
"""The file that every trainer of verl writes into a checkpoint after the model and before the tracker."""
EMPTY_HISTORY = "The run resumes at step %d, but %s. The history of %s starts empty in the middle of the run."
QUEUE = "transfer_queue"
"""The folder of unfinished responses, which verl's asynchronous trainers write after `data.pt`."""


@contextmanager
def saving(run: Run) -> Iterator[None]:
    """Write `verl_ext.json` into the checkpoint that verl writes in the block.

    The `data.pt` and the queue of an earlier run are put aside, so that a killed save leaves no mixture of two runs. If
    the block raises, they are put back only if no other file has changed and no other rank can still write.
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
        content = {
            "verl_ext": __version__,
            "global_step": run.step,
            "overwrites": overwrites,
            "computed_at": run.computed_at,
            **_identity(run),
            "accuracy": run.accuracy,
            "state": state,
        }
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(content, indent=2, allow_nan=False), encoding="utf-8")
        if state is not None:
            logger.info("Saved the state of %s to %s.", run.name, path)
        before = _files(folder)
        yield
    except Exception as error:
        if before is not None and data not in aside:
            raise
        why = str(error).rpartition("\n")[2]  # a worker's traceback ends with it
        left = "The folder may contain files of two runs. Resume from another checkpoint."
        if before is None or (run.trainer.actor_rollout_wg.world_size == 1 and before == _files(folder)):
            left = "No file was overwritten, so a run can still resume from the earlier checkpoint in this folder."
            if not had_state:
                path.unlink(missing_ok=True)
            for old, kept in reversed(aside.items()):  # `data.pt` last: with it the checkpoint is whole
                kept.rename(old)
        raise CheckpointError(f"Step {run.step} cannot be saved to {folder}: {why.rstrip('.'):.200}. {left}") from error
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
                f"{path} is the state of an earlier run, whose checkpoint this save overwrites. It cannot be removed: "
                f"{error.strerror}. Make the folder writable, or set another trainer.default_local_dir."
            ) from error
        return
    sync_folder(path.parent)
    logger.info("Removed %s, the state of an earlier run, because this save overwrites its checkpoint.", path)


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
    """Load the state after verl has loaded its checkpoint; raise if the run cannot continue with it.

    Log a warning if the checkpoint has no state, or if another estimator, other rewards or other weights saved it.
    """
    config = run.trainer.config.trainer
    if config.resume_mode == "disable" or run.step <= 0:
        return
    run.start = run.step
    folder = Path(config.resume_from_path) if config.resume_mode == "resume_path" else _folder(run)
    if run.chain is not None and _aside(folder / DATA).exists() and not (folder / DATA).exists():
        raise CheckpointError(
            f"{folder} may contain files of two runs because overwriting it failed. Resume from another checkpoint."
        )
    path = folder / FILE
    if run.chain is not None and run.chain.stateful:
        _load_state(run, run.chain, path)
    else:
        _compare_identity(run, path)


def _load_state(run: Run, chain: Chain, path: Path) -> None:
    """Load the state of a stateful estimator; raise if the file is damaged or belongs to another run."""
    try:
        data = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        if data["overwrites"] and not (path.parent / DATA).exists():
            raise CheckpointError(
                f"{path.parent} has no {DATA}, because a run was killed while it overwrote this folder"
            )
        differences = [*_differences(data, run)]
        if data["state"] is not None:
            _require_fitting(data, run)
            chain.check_state(data["state"])
            run.state, run.accuracy = data["state"], data["accuracy"]
            run.computed_at = run.step  # not that of the file, which may be one step behind: see `_require_fitting`
    except FileNotFoundError:
        logger.warning(EMPTY_HISTORY, run.step, f"{path} does not exist", run.name)
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, CheckpointError) as error:
        reason = str(error) if isinstance(error, CheckpointError) else f"It cannot be read: {error!r:.200}"
        raise CheckpointError(
            f"{path}: {reason.rstrip('.')}. Resume with the settings that wrote the file, or from another checkpoint. "
            "If you delete the file, the history starts empty."
        ) from error
    if run.state is None:
        logger.warning(EMPTY_HISTORY, run.step, f"{path} has no state", run.name)
    else:
        logger.info("Loaded the state of %s from %s.", run.name, path)
    _warn_of(differences, path)


def _compare_identity(run: Run, path: Path) -> None:
    """Log a warning if an estimator without a state resumes from a checkpoint that another configuration saved."""
    try:
        data = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        differences = [*_differences(data, run)]
    except FileNotFoundError:
        if run.chain is not None:
            logger.warning(
                "The run resumes at step %d with %s, but %s does not exist, so verl_ext cannot verify which estimator "
                "saved the checkpoint.",
                *(run.step, run.name, path),
            )
        return
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning(
            "%s cannot be read (%r), so verl_ext cannot verify that the checkpoint was saved with the same estimator.",
            *(path, error),
        )
        return
    _warn_of(differences, path)


def _identity(run: Run) -> dict[str, Any]:
    """Return the estimator and the rewards of a run, as a checkpoint stores them."""
    rewards = run.settings.rewards
    keys = list(rewards.keys or ())
    return {"estimator": run.name, "keys": keys, "weights": list(rewards.weights or [1.0] * len(keys))}


def _differences(data: Mapping[str, Any], run: Run) -> Iterator[str]:
    """Yield each setting with which a checkpoint was saved and that is another one in this run."""
    settings = {
        "estimator": "algorithm.adv_estimator",
        "keys": "algorithm.rewards.keys",
        "weights": "algorithm.rewards.weights",
    }
    for name, now in _identity(run).items():
        if data[name] != now:
            yield f"{settings[name]}={data[name]} instead of {now}"


def _warn_of(differences: list[str], path: Path) -> None:
    if differences:
        logger.warning(
            "The run resumes from %s, which was saved with %s. It continues with the new values. To train from the "
            "beginning, set trainer.resume_mode=disable or another trainer.default_local_dir.",
            *(path.parent, " and ".join(differences)),
        )


def _folder(run: Run) -> Path:
    """Return the folder of verl's checkpoint at the step of a run."""
    return Path(run.trainer.config.trainer.default_local_dir) / f"{STEP_FOLDER}{run.step}"


def _require_fitting(data: Any, run: Run) -> None:
    """Raise if a file's state is not the one with which the run must continue.

    The state may be one step older than its checkpoint: a trainer that counts its step before its last save, as
    verl-recipe's DAPO does, saves the model of step N as step N + 1.
    """
    step, computed_at = run.step, data["computed_at"]
    if data["global_step"] != step:
        raise CheckpointError(
            f"The file was written at step {data['global_step']!r}, but the run resumes at step {step}"
        )
    if data["estimator"] != run.name:
        raise CheckpointError(
            f"The file contains the state of algorithm.adv_estimator={data['estimator']}, but this run uses {run.name}"
        )
    if computed_at < step - 1:
        raise CheckpointError(
            f"The state was computed at step {computed_at}, but the checkpoint belongs to step {step}"
        )
    if data["accuracy"] is not None:
        key, settings = data["accuracy"]["key"], run.settings.rewards
        now = {"key": settings.accuracy_key or key, "threshold": settings.accuracy_threshold}
        require_same_accuracy(data["accuracy"], now)


def require_same_accuracy(saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """Raise if a run that started with one accuracy would continue with another one."""
    if saved is None or saved == now:
        return
    fixes = []
    if saved["key"] != now["key"]:
        fixes.append(f"Set ++algorithm.rewards.accuracy_key={saved['key']}, and return this name for every batch.")
    if saved["threshold"] is None and now["threshold"] is not None:
        fixes.append("Remove algorithm.rewards.accuracy_threshold.")
    elif saved["threshold"] != now["threshold"]:
        fixes.append(f"Set ++algorithm.rewards.accuracy_threshold={saved['threshold']}.")
    raise CheckpointError(
        f"The accuracy was {_accuracy_text(saved)} in earlier batches or in the saved history, but now it is "
        f"{_accuracy_text(now)}. {' '.join(fixes)}"
    )


def _accuracy_text(accuracy: Mapping[str, Any]) -> str:
    threshold = accuracy["threshold"]
    return f"the reward {accuracy['key']!r} " + ("without a threshold" if threshold is None else f"above {threshold}")


def check_tracker(run: Run) -> None:
    """Raise if a run would resume from a tracker that names an incomplete checkpoint; verl might start over silently.

    A process that was killed while it saved, or a full disk, leaves an empty tracker or an incomplete checkpoint.
    """
    config = run.trainer.config.trainer
    home = Path(config.default_local_dir)
    path = home / TRACKER
    if run.chain is None or config.resume_mode != "auto" or not path.exists():
        return
    with reading(f"{path} (the file with the step to resume from)", CheckpointError):
        text = path.read_text(errors="replace").strip()
    if text.isdecimal() and (home / f"{STEP_FOLDER}{text}" / DATA).is_file():
        return
    whole = sorted((file.stat().st_mtime, file.parent.name) for file in home.glob(f"{STEP_FOLDER}*/{DATA}"))
    newest = f"The newest complete checkpoint is {whole[-1][1]}." if whole else "The folder has no complete checkpoint."
    raise CheckpointError(
        f"{path} contains {text[:20]!r}, which is not the step of a complete checkpoint. {newest} Write the step to "
        "resume from into the file, or set trainer.resume_mode=disable to train from the beginning."
    )
