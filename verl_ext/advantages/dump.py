"""`algorithm.verl_ext.dump_dir`: one parquet file per update with its advantages, a row for each trajectory or turn."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.groups import Array
from verl_ext.core.steps import WeightedSum
from verl_ext.files import replacing
from verl_ext.run import Run
from verl_ext.settings import Settings

FAILED = "dump"
"""The key by which a run remembers that a dump failed."""


def write(run: Run, batch: Batch, advantages: Array, *, total: Array | None = None) -> None:
    """Write one file for this update of a trainer; if that fails, log a warning and stop dumping.

    `total` is the score in a run of an estimator of verl's own.
    """
    if FAILED in run.warned:
        return
    settings, dump_dir = run.settings, str(run.settings.verl_ext.dump_dir)
    place = {"step": run.step, "update": run.update}
    about = {
        "estimator": run.name,
        "algorithm": dict(settings.given),
        "loss_agg_mode": settings.loss_agg_mode,
        **place,
    }
    values = {
        **{name: np.full(len(advantages), number) for name, number in place.items()},
        "uid": [str(batch.prompts.labels[prompt]) for prompt in batch.prompts.ids.tolist()],
        "advantage": advantages,
        **columns(settings, batch),
    }
    if total is not None:
        values["total"] = total
    try:
        if run.dumps is None:
            run.dumps = new_folder(Path(dump_dir), run.start)
        save(run.dumps / f"advantages-{run.step:08d}-{run.update:03d}.parquet", values, about)
    except Exception as error:  # noqa: BLE001 - pyarrow raises its own; no failure of a dump may end a run
        run.warn_once(
            FAILED,
            f"Advantages cannot be written to algorithm.verl_ext.dump_dir={dump_dir}: {error}. This run writes no "
            "more of them.",
        )


def make_dump_dir(run: Run) -> None:
    """Make the folder `algorithm.verl_ext.dump_dir`, if it is set."""
    dump_dir = run.settings.verl_ext.dump_dir
    if dump_dir is not None:
        Path(dump_dir).mkdir(parents=True, exist_ok=True)


def new_folder(home: Path, start: int) -> Path:
    """Make the folder of a run that begins after the step `start`: `from-<start>-<first free number>`."""
    number = 0
    while True:
        folder = home / f"from-{start}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def columns(settings: Settings, batch: Batch) -> dict[str, Any]:
    """Return one entry per trajectory by column: what the estimator saw, NaN where not scored, and its groups."""
    whole, per_turn = batch.by_reward(), bool(settings.rewards.per_turn)
    groups, seen = batch.groups, whole.returns
    mean, varies = groups.variation(seen)
    std = groups.std(seen - groups.broadcast(mean))
    values: dict[str, Any] = {
        "responses": groups.broadcast(groups.sizes),
        "tokens": batch.lengths,
        "outputs": batch.outputs,
        "total": _weighted_sum(batch, settings.rewards.weights),
    }
    if per_turn:
        values["turn"] = batch.turns.number + 1
    for column, key in enumerate(whole.keys):
        values[f"reward/{key}"] = batch.fields[key] if key in (settings.rewards.rubrics or ()) else seen[:, column]
        if per_turn or batch.conditions:
            values[f"raw/{key}"] = whole.raw[:, column]
        values[f"group_mean/{key}"] = groups.broadcast(mean[:, column])
        values[f"group_std/{key}"] = groups.broadcast(std[:, column])
        values[f"group_varies/{key}"] = groups.broadcast(varies[:, column])
    return values if batch.accuracy is None else values | {"accuracy": batch.accuracy}


def _weighted_sum(batch: Batch, weights: tuple[float, ...] | None) -> Array:
    """Return `[N]` the weighted sum of the rewards, without a KL term."""
    without_kl = replace(batch, kl_reward=None)
    if weights is not None:
        without_kl = without_kl.with_weights(weights)
    return WeightedSum().apply(batch.returns, without_kl)[:, 0]


def save(path: Path, columns_by_name: dict[str, Any], about: dict[str, Any]) -> None:
    """Write a parquet file atomically, with `about` as JSON in its metadata under the key `verl_ext`."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(columns_by_name).replace_schema_metadata({"verl_ext": json.dumps(about)})
    with replacing(path) as temporary:
        pyarrow.parquet.write_table(table, temporary, compression="zstd")
