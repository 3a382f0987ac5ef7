"""`algorithm.verl_ext.dump_dir`: one parquet file per update, with a row for each trajectory, or for each turn."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_ext.advantages.table import Table
from verl_ext.core.batch import Batch
from verl_ext.core.groups import Array, divide
from verl_ext.core.row_index import float_mask, row_sums, scores
from verl_ext.core.steps import WeightedSum
from verl_ext.files import replacing
from verl_ext.run import Run
from verl_ext.settings import Settings

FAILED = "dump"
"""The key by which a run remembers that a dump failed."""


@dataclass(frozen=True)
class DumpFolder:
    """The folder of one start. The metadata of every file state when the start began, so that starts have an order."""

    path: Path
    after_step: int
    """The step after which the start begins: 0, or the step of the checkpoint from which it resumes."""
    started_at: float
    """When the folder was made, in seconds since 1970 by the clock of this machine."""

    @classmethod
    def make(cls, dump_dir: Path, after_step: int) -> DumpFolder:
        """Make the folder `from-<after_step>-<n>` in `dump_dir`, where `n` is the first free number.

        Two starts that do this at the same time have different folders.
        """
        number = 0
        while True:
            path = dump_dir / f"from-{after_step}-{number}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                number += 1
            else:
                return cls(path, after_step, started_at=time.time())

    def save(self, step: int, update: int, columns: dict[str, Any], settings: dict[str, Any]) -> None:
        """Write the columns of one update to a parquet file, whole or not at all.

        The metadata, as JSON under the key `verl_ext`, hold the settings of the run and what `compare` needs to order
        the starts of the run.
        """
        import pyarrow
        import pyarrow.parquet

        metadata: dict[str, Any] = {"step": step, "update": update}
        metadata.update(settings)
        metadata["after_step"] = self.after_step
        metadata["started_at"] = self.started_at
        metadata["written_at"] = time.time()
        table = pyarrow.table(columns).replace_schema_metadata({"verl_ext": json.dumps(metadata)})
        path = self.path / f"advantages-{step:08d}-{update:03d}.parquet"
        with replacing(path) as temporary:
            pyarrow.parquet.write_table(table, temporary, compression="zstd")


def write(run: Run, batch: Batch, advantages: Array, *, total: Array | None = None) -> None:
    """Write one file for this update of a trainer. If that fails, log a warning and stop dumping.

    `total` is the score of each trajectory in a run of an estimator of verl's own. By default the column `total` is the
    weighted sum of the rewards.
    """
    if FAILED in run.warned:
        return
    settings = run.settings
    dump_dir = str(settings.verl_ext.dump_dir)
    settings_of_run = {
        "estimator": run.name,
        "algorithm": dict(settings.given),
        "loss_agg_mode": settings.loss_agg_mode,
        "total_is_weighted_sum": total is None,
    }
    columns = {
        "step": np.full(len(advantages), run.step),
        "update": np.full(len(advantages), run.update),
        "uid": _uids(batch),
        "advantage": advantages,
        **reward_columns(settings, batch),
    }
    if total is not None:
        columns["total"] = total
    try:
        if run.dumps is None:
            run.dumps = DumpFolder.make(Path(dump_dir), run.after_step)
        run.dumps.save(run.step, run.update, columns, settings_of_run)
    except Exception as error:  # noqa: BLE001 - pyarrow raises its own; no failure of a dump may end a run
        run.warn_once(
            FAILED,
            f"Advantages cannot be written to algorithm.verl_ext.dump_dir={dump_dir}: {error}. This run writes no "
            "more of them.",
        )


def write_of_verl_estimator(run: Run, table: Table, batch: Batch, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the rewards with verl's advantages, of which each response has the mean over its tokens.

    `tensors` has `advantages`, `response_mask` and `token_level_scores`, each `[B, L]`.
    """
    mask = float_mask(tensors["response_mask"], torch.float32)
    tokens_of_row = row_sums(mask)
    sums = (tensors["advantages"].float() * mask).sum(dim=-1).double().cpu().numpy()
    advantages = table.row_index.gather(divide(sums, tokens_of_row))
    total = table.row_index.gather(scores(tensors["token_level_scores"], mask))
    batch_with_lengths = replace(batch, lengths=table.row_index.total(tokens_of_row))
    write(run, batch_with_lengths, advantages, total=total)


def make_dump_dir(run: Run) -> None:
    """Make the folder `algorithm.verl_ext.dump_dir`, if it is set."""
    dump_dir = run.settings.verl_ext.dump_dir
    if dump_dir is not None:
        Path(dump_dir).mkdir(parents=True, exist_ok=True)


def _uids(batch: Batch) -> list[str]:
    """Return the uid of each row's prompt."""
    return [str(batch.prompts.labels[prompt]) for prompt in batch.prompts.ids.tolist()]


def reward_columns(settings: Settings, batch: Batch) -> dict[str, Any]:
    """Return the rewards that the estimator read, the statistics of their groups, and the sizes, one entry per row.

    A reward is NaN where it is not scored. The column of a rubric is its text, and its group statistics are those of
    the weighted sum of its criteria.
    """
    rewards = settings.rewards
    groups = batch.groups
    columns: dict[str, Any] = {
        "responses": groups.broadcast(groups.sizes),
        "tokens": batch.lengths,
        "outputs": batch.outputs,
        "total": _weighted_sum(batch, rewards.weights),
    }
    if rewards.per_turn:
        columns["turn"] = batch.turns.number + 1
    batch_by_reward = batch.by_reward()
    returns = batch_by_reward.returns
    group_mean, group_varies = groups.variation(returns)
    group_std = groups.std(returns - groups.broadcast(group_mean))
    returns_differ_from_raw = bool(rewards.per_turn) or bool(batch.conditions)
    for index, key in enumerate(batch_by_reward.keys):
        is_rubric = key in (rewards.rubrics or ())
        columns[f"reward/{key}"] = batch.fields[key] if is_rubric else returns[:, index]
        if returns_differ_from_raw:
            columns[f"raw/{key}"] = batch_by_reward.raw[:, index]
        columns[f"group_mean/{key}"] = groups.broadcast(group_mean[:, index])
        columns[f"group_std/{key}"] = groups.broadcast(group_std[:, index])
        columns[f"group_varies/{key}"] = groups.broadcast(group_varies[:, index])
    if batch.accuracy is not None:
        columns["accuracy"] = batch.accuracy
    return columns


def _weighted_sum(batch: Batch, weights: tuple[float, ...] | None) -> Array:
    """Return `[N]` the weighted sum of the rewards, without a KL term."""
    without_kl = replace(batch, kl_reward=None)
    if weights is not None:
        without_kl = without_kl.with_weights(weights)
    return WeightedSum().apply(batch.returns, without_kl)[:, 0]
