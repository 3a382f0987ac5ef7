"""verl's default (V1) trainer: give the estimators named rewards, padding and sessions, and log their metrics.

`PPOTrainer._compute_advantage` of verl 0.9.0 and 0.9.1 fetches neither the reward components nor the padding tags from
TransferQueue.
"""

import logging
from collections.abc import Hashable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from verl_ext import hooks
from verl_ext.advantages import group_filter, queue
from verl_ext.advantages.estimator import log_and_dump
from verl_ext.advantages.prompts import FIELDS, naming_prompts
from verl_ext.advantages.run import Run
from verl_ext.advantages.table import Table
from verl_ext.core.row_index import dense, uids_of
from verl_ext.trainers.mixin import WithEstimators

logger = logging.getLogger("verl_ext")

MISSING = "advantage/missing_responses"
"""Metric: the number of expected responses that did not arrive."""


def install(trainer_base: ModuleType) -> None:
    """Put our class over verl's."""
    hooks.put_over(trainer_base, DefaultTrainer)


class DefaultTrainer(WithEstimators):
    """A trainer over TransferQueue with this package's part."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self._verl_ext is not None:
            group_filter.replace_filter(self, self._verl_ext)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Compute with the rewards of the batch, and log our metrics."""
        verl: Any = super()
        run = self._verl_ext
        if run is None:
            return verl._compute_advantage(batch, metrics)
        with naming_prompts(partial(_fields_of, batch)):
            table = queue.table_of(batch.keys, batch.partition_id, run.needs, tags=batch.tags)
            missing = missing_responses(self, len(table.labels))
            if run.settings.rewards.token_scores:
                _write_token_scores(batch, table, run)
            with run.computing(table):
                result = verl._compute_advantage(batch, metrics)
            if run.chain is None:
                log_and_dump(run, table, lambda: _tensors(batch))
        run.metrics[MISSING] = missing
        run.add_metrics(metrics)
        return result


def missing_responses(trainer: Any, arrived: int) -> float:
    """Return how many of the expected responses are missing; log a warning if there are any.

    In `sync` mode verl trains on the responses that are left when others fail: groups get smaller, or vanish.
    """
    config, updates = trainer.config, hooks.member(trainer, "parameter_sync_step")
    expected = config.data.train_batch_size // updates * config.actor_rollout_ref.rollout.n
    missing = max(0, expected - arrived)
    if missing:
        logger.warning(
            "Step %d: %d of %d responses are missing (metric %s), and verl trains on the rest. To replace prompts "
            "without any response, set trainer.v1.sampler.sync_refill_failed_groups=True and data.gen_batch_size=1.",
            *(trainer.global_steps, missing, expected, MISSING),
        )
    return float(missing)


def _fields_of(batch: Any, uid: Hashable) -> dict[str, Any]:
    """Return the fields of the first response with this uid that say which row of the data it belongs to."""
    key = batch.keys[uids_of(batch.keys).index(str(uid))]
    data = queue.fetch([key], batch.partition_id, FIELDS)
    fields = {}
    for name in set(FIELDS).intersection(data.keys()):
        values = data[name]
        fields[name] = values[0] if isinstance(values, list) else values.tolist()[0]
    return fields


def _tensors(batch: Any) -> dict[str, torch.Tensor]:
    """Return the advantages of a batch, its mask and scores, padded."""
    data = queue.fetch(batch.keys, batch.partition_id, ["advantages", "response_mask", "rm_scores"])
    data["token_level_scores"] = data.pop("rm_scores")
    return {name: dense(values) for name, values in data.items()}


def _write_token_scores(batch: Any, table: Table, run: Run) -> None:
    """Write `token_level_scores_<key>` into the batch."""
    lengths = queue.fetch(batch.keys, batch.partition_id, ["response_mask"])["response_mask"].offsets().diff()
    if fields := dict(table.token_fields(run.settings.rewards.keys or (), lengths)):
        queue.write(batch.keys, batch.partition_id, fields)
