"""Save an estimator and its state in verl's checkpoints, and load it. `verl_ext.json` is the file of a checkpoint.

verl writes the model first, then `data.pt`, then the queue of unfinished responses, which only asynchronous trainers
have. It writes last the tracker, which names the step to resume from. A checkpoint without `data.pt` is incomplete, and
no run with an estimator of verl_ext resumes from it.

Before verl writes, such a run prepares the folder of the checkpoint, which may contain a checkpoint of an earlier run:

1. It removes `data.pt`, and then the queue of the earlier run.
2. It replaces `verl_ext.json`, as a whole or not at all.

If a save fails or is killed, the folder therefore contains one of these, and never a complete checkpoint of two runs:

- The checkpoint of the earlier run, until `data.pt` is removed.
- An incomplete checkpoint, until verl has written the whole model. The checkpoint of the earlier run is lost.
- The model and the state of the later run, as soon as verl has written the new `data.pt`.

There is one exception: with Megatron's `checkpoint.async_save=True`, verl writes `data.pt` while the model is still
being saved, and does not write the tracker.

A run without an estimator of verl_ext only removes the `verl_ext.json` of the earlier run.
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from verl_ext import __version__
from verl_ext.core.chain import Chain, plain_state
from verl_ext.errors import CheckpointError, explaining_errors, listed
from verl_ext.files import replacing, sync_folder
from verl_ext.run import Run

logger = logging.getLogger("verl_ext")

FILE = "verl_ext.json"
TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file that names the current checkpoint."""
STEP_FOLDER = "global_step_"
DATA = "data.pt"
"""verl's file with the position in the training data."""
QUEUES = ("transfer_queue", "transfer_queue.old")
"""verl's folder of unfinished responses, and the name under which TransferQueue keeps it while it writes a new one."""
SETTINGS = {
    "estimator": "algorithm.adv_estimator",
    "keys": "algorithm.rewards.keys",
    "weights": "algorithm.rewards.weights",
}
"""The settings that a checkpoint records, by their names in `Saved`."""


@dataclass(frozen=True)
class Saved:
    """The content of `verl_ext.json`."""

    verl_ext: str
    """The version of the package."""
    global_step: int
    """The step of the checkpoint."""
    computed_at: int
    """The step of the last batch that the state contains."""
    estimator: str
    keys: list[str]
    weights: list[float]
    accuracy: dict[str, Any] | None
    """Key and threshold of the accuracy that the state was computed from."""
    state: dict[str, Any] | None
    """The state of the estimator; None if it has no state."""

    @classmethod
    def of(cls, run: Run) -> "Saved":
        """Return what a checkpoint of a run contains now. Raise if JSON cannot represent the state."""
        rewards = run.settings.rewards
        keys = list(rewards.keys or ())
        return cls(
            verl_ext=__version__,
            global_step=run.step,
            computed_at=run.computed_at,
            estimator=run.name,
            keys=keys,
            weights=list(rewards.weights or [1.0] * len(keys)),
            accuracy=run.accuracy,
            state=plain_state(run.state) if run.state else None,
        )

    @classmethod
    def read(cls, path: Path) -> "Saved | None":
        """Return the content of a file, or None if it does not exist. Raise if it is damaged."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            entries = {field.name: content[field.name] for field in fields(cls)}
            if not isinstance(entries["computed_at"], int):
                raise ValueError(f"computed_at is {entries['computed_at']!r}, expected an integer")
            return cls(**entries)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"The file cannot be read ({error!r:.200})") from error


def save_state(run: Run) -> None:
    """Prepare the folder of a checkpoint, and write `verl_ext.json` into it. Call this function before verl writes."""
    folder = _folder(run)
    saved = Saved.of(run)
    text = json.dumps(asdict(saved), indent=2, allow_nan=False)
    try:
        _remove_data_and_queues(folder)
        with replacing(folder / FILE) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"Step {run.step} cannot be saved to {folder}: {error}. verl has not written anything. If the folder "
            f"contained the checkpoint of an earlier run and has no {DATA} now, this checkpoint is lost. Free disk "
            "space or make the folder writable, and start the run again."
        ) from error
    if saved.state is not None:
        logger.info("Saved the state of %s to %s.", run.name, folder / FILE)


def _remove_data_and_queues(folder: Path) -> None:
    """Make the checkpoint of an earlier run incomplete, and remove its queue, which not every trainer replaces.

    Without the sync, a crash of the machine could bring `data.pt` back after verl has overwritten the model.
    """
    (folder / DATA).unlink(missing_ok=True)
    sync_folder(folder)
    for name in QUEUES:
        queue = folder / name
        if queue.exists():
            shutil.rmtree(queue)
    for temporary in folder.glob(f".{FILE}.*.tmp"):  # of a process that was killed
        temporary.unlink()


def remove_earlier_state(trainer: Any) -> None:
    """Remove the state of an earlier run from the checkpoint that a run without an estimator of verl_ext overwrites.

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


def require_complete(run: Run) -> None:
    """Raise if a run would resume from an incomplete checkpoint. Call this function before verl loads.

    verl would resume from it, or start over silently if the tracker names a folder that does not exist.
    """
    config = run.trainer.config.trainer
    if run.chain is None or config.resume_mode == "disable":
        return
    if config.resume_mode == "resume_path":
        _require_complete(Path(str(config.resume_from_path)))
    else:
        _require_complete_step(Path(config.default_local_dir))


def _require_complete(folder: Path) -> None:
    """Raise if the folder of `trainer.resume_from_path` has no complete checkpoint."""
    if not (folder / DATA).is_file():
        raise CheckpointError(
            f"trainer.resume_from_path={folder} is not a complete checkpoint, because it has no {DATA}. If a save into "
            "this folder failed or was killed, the folder may contain files of two runs. Set trainer.resume_from_path "
            "to another checkpoint."
        )


def _require_complete_step(home: Path) -> None:
    """Raise if the tracker in `trainer.default_local_dir` does not name a complete checkpoint.

    A process that was killed while it saved, or a full disk, leaves an empty tracker or an incomplete checkpoint.
    """
    tracker = home / TRACKER
    if not tracker.exists():
        return
    with explaining_errors(f"{tracker} (the file with the step to resume from)", CheckpointError):
        text = tracker.read_text(errors="replace").strip()
    if text.isdecimal() and (home / f"{STEP_FOLDER}{text}" / DATA).is_file():
        return
    complete = list(home.glob(f"{STEP_FOLDER}*/{DATA}"))
    if complete:
        newest = max(complete, key=lambda data: (data.stat().st_mtime, data.parent.name))
        hint = f"The newest complete checkpoint is {newest.parent.name}."
    else:
        hint = "The folder has no complete checkpoint."
    raise CheckpointError(
        f"{tracker} contains {text[:20]!r}, which is not the step of a complete checkpoint. {hint} Write the step to "
        "resume from into the file, or set trainer.resume_mode=disable to train from the beginning."
    )


def load(run: Run) -> None:
    """Load the state after verl has loaded its checkpoint, and note the step after which the run begins.

    Raise if an estimator with a state cannot continue with it. Log a warning if the checkpoint has no state, or if
    another estimator, other rewards or other weights saved it.
    """
    config = run.trainer.config.trainer
    if config.resume_mode == "disable" or run.step <= 0:
        return
    run.after_step = run.step
    folder = Path(config.resume_from_path) if config.resume_mode == "resume_path" else _folder(run)
    path = folder / FILE
    stateful_chain = run.chain if run.chain is not None and run.chain.stateful else None
    try:
        saved = Saved.read(path)
        if saved is not None and stateful_chain is not None:
            _restore_state(run, stateful_chain, saved)
    except CheckpointError as error:
        reason = str(error).rstrip(".")
        if stateful_chain is not None:
            raise CheckpointError(
                f"{path}: {reason}. Resume with the settings that wrote the file, or from another checkpoint. If you "
                "delete the file, the history starts empty."
            ) from error
        logger.warning(
            "%s: %s. verl_ext cannot verify that the checkpoint was saved with the same estimator.", path, reason
        )
        return
    if stateful_chain is not None:
        _log_state(run, stateful_chain, saved, path)
    elif saved is None and run.chain is not None:
        logger.warning(
            "The run resumes at step %d with %s, but %s does not exist, so verl_ext cannot verify which estimator "
            "saved the checkpoint.",
            *(run.step, run.name, path),
        )
    if saved is not None:
        _warn_of_differences(run, saved, folder)


def _restore_state(run: Run, chain: Chain, saved: Saved) -> None:
    """Give the run the state in the file, if there is one. Raise if the run cannot continue with it."""
    if saved.state is None:
        return
    _require_fitting(run, saved)
    chain.check_state(saved.state)
    run.state = saved.state
    run.accuracy = saved.accuracy
    run.computed_at = run.step  # not that of the file, which may be one step behind: see `_require_fitting`


def _require_fitting(run: Run, saved: Saved) -> None:
    """Raise if a saved state has another step, another estimator or another accuracy than the run.

    The state may be one step older than its checkpoint: a trainer that counts its step before its last save, as
    verl-recipe's DAPO does, saves the model of step N as step N + 1.
    """
    if saved.global_step != run.step:
        raise CheckpointError(
            f"The file was written at step {saved.global_step!r}, but the run resumes at step {run.step}"
        )
    if saved.estimator != run.name:
        raise CheckpointError(
            f"The file contains the state of algorithm.adv_estimator={saved.estimator}, but this run uses {run.name}"
        )
    if saved.computed_at < run.step - 1:
        raise CheckpointError(
            f"The state was computed at step {saved.computed_at}, but the checkpoint belongs to step {run.step}"
        )
    if saved.accuracy is not None:
        rewards = run.settings.rewards
        key = rewards.accuracy_key or saved.accuracy["key"]
        require_same_accuracy(saved.accuracy, {"key": key, "threshold": rewards.accuracy_threshold})


def _log_state(run: Run, chain: Chain, saved: Saved | None, path: Path) -> None:
    """Log whether the history of an estimator continues, or why it starts empty."""
    if saved is not None and saved.state is not None:
        logger.info("Loaded the state of %s from %s.", run.name, path)
        _warn_of_missing_states(run, chain, saved.state, path)
        return
    reason = "does not exist" if saved is None else "has no state"
    logger.warning(
        "The run resumes at step %d, but %s %s. The history of %s starts empty in the middle of the run.",
        *(run.step, path, reason, run.name),
    )


def _warn_of_missing_states(run: Run, chain: Chain, state: Mapping[str, Any], path: Path) -> None:
    """Log a warning if some steps of an estimator have a saved state, but others do not."""
    without_state = chain.init().keys() - state.keys()
    if without_state:
        logger.warning(
            "The run resumes at step %d, but %s has no state of the step %s of %s. The history of this step starts "
            "empty in the middle of the run.",
            *(run.step, path, listed(without_state), run.name),
        )


def _warn_of_differences(run: Run, saved: Saved, folder: Path) -> None:
    """Log a warning if a checkpoint was saved with another estimator, other rewards or other weights."""
    current = Saved.of(run)
    differences = []
    for name, setting in SETTINGS.items():
        before = getattr(saved, name)
        now = getattr(current, name)
        if before != now:
            differences.append(f"{setting}={before} instead of {now}")
    if differences:
        logger.warning(
            "The run resumes from %s, which was saved with %s. It continues with the new values. To train from the "
            "beginning, set trainer.resume_mode=disable or another trainer.default_local_dir.",
            *(folder, " and ".join(differences)),
        )


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


def _folder(run: Run) -> Path:
    """Return the folder of verl's checkpoint at the step of a run."""
    return Path(run.trainer.config.trainer.default_local_dir) / f"{STEP_FOLDER}{run.step}"
