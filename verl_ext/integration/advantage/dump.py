"""`algorithm.verl_ext.dump_dir`: write the advantages of each update to a parquet file, one row per trajectory."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.groups import Array
from verl_ext.core.state import RunState
from verl_ext.core.steps import WeighAndSum
from verl_ext.errors import ConfigurationError
from verl_ext.files import DUMPS, replacing
from verl_ext.settings import Settings

logger = logging.getLogger("verl_ext")

OLD = f"{DUMPS}.old"
"""Files that a later run has set aside."""
FAILED = "dump"
"""The key by which a run remembers that a dump failed."""
STALE = 3600.0
"""The age in seconds at which a temporary file must be that of a killed process."""
_calls = itertools.count()  # the "step" in the file names of direct calls


def prepare(folder: str) -> None:
    """Raise at start-up if dumping would fail at the first step."""
    try:
        import pyarrow.parquet  # noqa: F401 - checks that it can be imported
    except ImportError as error:
        raise ConfigurationError(f"algorithm.verl_ext.dump_dir={folder} needs pyarrow: pip install pyarrow") from error
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for left in Path(folder).glob(f".{DUMPS}.*.tmp"):
            if time.time() - left.stat().st_mtime > STALE:
                left.unlink()
        probe = Path(folder) / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(f"algorithm.verl_ext.dump_dir={folder} cannot be written: {error}") from error


def write(
    settings: Settings,
    name: str,
    batch: Batch,
    labels: Sequence[Hashable],
    advantages: Array,
    *,
    trainer: Any,
    run: RunState,
    total: Array | None = None,
) -> None:
    """Write one file for this update and remove the oldest files.

    `total` is the score, before any KL term, in a run of an estimator of verl's own. If the disk is full, log a warning
    and stop dumping.
    """
    own = settings.verl_ext
    step = step_of(trainer)
    if step < 0:
        step = next(_calls)
    # verl's asynchronous trainers make several updates a step.
    update = int(getattr(trainer, "local_trigger_step", 0))
    if own.dump_dir is None or FAILED in run.warned:
        return
    try:
        folder = Path(own.dump_dir)
        folder.mkdir(parents=True, exist_ok=True)
        values = columns(settings, batch)
        if total is not None:
            values["total"] = total
        size = len(advantages)
        where = {"step": np.full(size, step), "update": np.full(size, update), "estimator": [name] * size}
        ends = {"uid": [storable(label) for label in labels], "advantage": advantages}
        save(folder / f"advantages-{step:08d}-{update:03d}.parquet", where | ends | values)
        prune(folder, 200e6)
    except OSError as error:
        run.warned.add(FAILED)
        logger.warning("algorithm.verl_ext.dump_dir=%s: %s; this run dumps no more advantages", own.dump_dir, error)


def step_of(trainer: Any) -> int:
    """The step that verl logs for this update, and that a resumed run repeats; -1 without a trainer.

    `global_steps` of the fully asynchronous trainer counts updates, and one too many after each resumption.
    """
    version = getattr(trainer, "current_param_version", None)
    return int(getattr(trainer, "global_steps", -1)) if version is None else int(version) + 1


def set_aside(folder: str, step: int) -> None:
    """Rename the files of steps after `step`, from which a run goes on: they are of an earlier run, or repeated now.

    Files that an earlier call renamed are removed.
    """
    numbered = [path for path in Path(folder).glob(DUMPS) if path.name[11:19].isdecimal()]
    later = [path for path in numbered if int(path.name[11:19]) > step]
    if not later:
        return
    try:
        for path in Path(folder).glob(OLD):
            path.unlink()
        for path in later:
            path.replace(path.with_name(f"{path.name}.old"))
    except OSError as error:
        logger.warning("algorithm.verl_ext.dump_dir=%s holds files of an earlier run: %s", folder, error)
        return
    logger.warning(
        "algorithm.verl_ext.dump_dir=%s: renamed the files after step %d (%d) to *.old; they are of an earlier run, or "
        "of steps that this run repeats",
        folder,
        step,
        len(later),
    )


def columns(settings: Settings, batch: Batch) -> dict[str, Any]:
    """By column: one entry per trajectory. Rewards are raw, NaN where not scored."""
    groups = batch.groups
    mean, varies = batch.groups.variation(batch.rewards)
    std = groups.std(batch.rewards - groups.broadcast(mean))
    values: dict[str, Any] = {
        "responses": groups.broadcast(groups.sizes),
        "tokens": batch.lengths,
        "total": WeighAndSum(settings.rewards.weights).apply(batch.rewards, batch)[:, 0],
    }
    for column, key in enumerate(map(storable, batch.keys)):
        values[f"reward/{key}"] = batch.rewards[:, column]
        values[f"group_mean/{key}"] = groups.broadcast(mean[:, column])
        values[f"group_std/{key}"] = groups.broadcast(std[:, column])
        values[f"group_varies/{key}"] = groups.broadcast(varies[:, column])
    return values if batch.accuracy is None else values | {"accuracy": batch.accuracy}


def storable(name: object) -> str:
    r"""Text that a file can hold: a lone surrogate, which data may contain, cannot be encoded.

    >>> storable(("p", 1)), storable("\ud800")
    ("('p', 1)", '\\ud800')
    """
    return str(name).encode("utf-8", "backslashreplace").decode("utf-8")


def save(path: Path, columns_by_name: dict[str, Any]) -> None:
    """Write a parquet file atomically."""
    import pyarrow
    import pyarrow.parquet

    with replacing(path) as temporary:
        pyarrow.parquet.write_table(pyarrow.table(columns_by_name), temporary, compression="zstd")


def prune(folder: Path, limit: float) -> None:
    """Remove the oldest files, of an earlier run first, until the rest fit into `limit` bytes; the newest stays."""
    files = [*sorted(folder.glob(OLD)), *sorted(folder.glob(DUMPS))]
    sizes = [path.stat().st_size for path in files]
    total = sum(sizes)
    for path, size in zip(files[:-1], sizes, strict=False):
        if total <= limit:
            return
        path.unlink()
        total -= size
