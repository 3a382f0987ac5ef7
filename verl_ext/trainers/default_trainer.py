"""verl's default (V1) trainer: give the estimators named rewards, padding and sessions, and log their metrics.

`PPOTrainer._compute_advantage` of verl 0.9.0 and 0.9.1 fetches neither the reward components nor the padding tags from
TransferQueue.
"""

import functools
import logging
from collections.abc import Callable, Hashable
from types import ModuleType
from typing import Any

import torch

from verl_ext import hooks
from verl_ext.advantages import group_filter, queue
from verl_ext.advantages.estimator import computing
from verl_ext.advantages.log import record_step_of_verl_estimator
from verl_ext.advantages.prompts import FIELDS, naming_prompts
from verl_ext.advantages.table import Request, Table
from verl_ext.core.row_index import dense, uids_of
from verl_ext.errors import IntegrationError
from verl_ext.run import Run
from verl_ext.run_config import uses_verl_ext
from verl_ext.trainers.mixin import (
    REQUIRED_METHODS,
    TrainerMixin,
    UnsupportedTrainer,
    config_of_call,
    require_same_parameters,
    with_mixin,
)

logger = logging.getLogger("verl_ext")

MISSING = "advantage/missing_responses"
"""Metric: the number of expected responses that did not arrive."""


def install(trainer_base: ModuleType) -> None:
    """Wrap the function with which verl selects its own trainers and those of other packages."""
    verl_trainer = hooks.member(trainer_base, "PPOTrainer")
    try:
        require_same_parameters(DefaultTrainer, verl_trainer, (*REQUIRED_METHODS, "_compute_advantage"))
    except IntegrationError:
        hooks.wrap(trainer_base, "get_trainer_cls", wrap_unsupported)
        raise
    hooks.wrap(trainer_base, "get_trainer_cls", wrap_get_trainer_cls)


def wrap_get_trainer_cls(original: Callable[..., Any], name: str) -> Any:
    """`get_trainer_cls(name)`: apply the mixin to the class that verl selects.

    Another package may register a function that makes trainers instead of a class. The trainer that it makes must have
    a class that `get_trainer_cls` returns, if the run uses verl_ext.
    """
    chosen = original(name)
    if isinstance(chosen, type):
        return with_mixin(DefaultTrainer, chosen)

    @functools.wraps(chosen)
    def make(*args: Any, **kwargs: Any) -> Any:
        trainer = chosen(*args, **kwargs)
        if not isinstance(trainer, DefaultTrainer) and uses_verl_ext(config_of_call(args, kwargs)):
            made_by = getattr(chosen, "__qualname__", type(chosen).__qualname__)
            raise IntegrationError(
                f"trainer.v1.trainer_mode={name} is registered as the function {made_by}, and the "
                f"{type(trainer).__qualname__} that it returns does not have the methods of verl_ext. Register the "
                "class itself, or return an object of the class that verl.trainer.ppo.v1.get_trainer_cls returns."
            )
        return trainer

    return make


def wrap_unsupported(original: Callable[..., Any], name: str) -> Any:
    """`get_trainer_cls(name)` of a verl whose trainer has changed: reject runs that use verl_ext."""
    chosen = original(name)
    return with_mixin(UnsupportedTrainer, chosen) if isinstance(chosen, type) else chosen


class DefaultTrainer(TrainerMixin):
    """What verl_ext adds to a trainer over TransferQueue."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self._verl_ext is not None:
            group_filter.replace_filter(self, self._verl_ext)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Compute with the rewards of the batch, and log the metrics of verl_ext.

        `batch` names the rows of the queue: it has their keys and tags, and the partition that holds them.
        """
        parent: Any = super()
        run = self._verl_ext
        if run is None:
            return parent._compute_advantage(batch, metrics)
        with naming_prompts(functools.partial(_fields_of_prompt, batch)):
            table = queue.read_table(batch.keys, batch.partition_id, Request.of(run), tags=batch.tags)
            missing = missing_responses(self, len(table.labels))
            if run.settings.rewards.token_scores:
                _write_token_scores(batch, table, run)
            with computing(run, table):
                result = parent._compute_advantage(batch, metrics)
            if run.chain is None:
                record_step_of_verl_estimator(run, table, functools.partial(_tensors, batch))
        run.metrics[MISSING] = missing
        run.add_metrics(metrics)
        return result


def missing_responses(trainer: Any, arrived: int) -> float:
    """Return how many of the expected responses are missing; log a warning if there are any.

    In `sync` mode verl trains on the responses that are left when others fail: groups get smaller, or vanish.
    """
    config = trainer.config
    updates_per_step = hooks.member(trainer, "parameter_sync_step")
    expected = config.data.train_batch_size // updates_per_step * config.actor_rollout_ref.rollout.n
    missing = max(0, expected - arrived)
    if missing:
        logger.warning(
            "Step %d: %d of %d responses are missing (metric %s), and verl trains on the rest. To replace prompts "
            "without any response, set trainer.v1.sampler.sync_refill_failed_groups=True and data.gen_batch_size=1.",
            *(trainer.global_steps, missing, expected, MISSING),
        )
    return float(missing)


def _fields_of_prompt(batch: Any, uid: Hashable) -> dict[str, Any]:
    """Return the fields of the first response with this uid that say which row of the data it belongs to."""
    first_row = uids_of(batch.keys).index(str(uid))
    data = queue.fetch([batch.keys[first_row]], batch.partition_id, FIELDS)
    fields = {}
    for name in set(FIELDS).intersection(data.keys()):
        values = data[name]
        fields[name] = values[0] if isinstance(values, list) else values.tolist()[0]
    return fields


def _tensors(batch: Any) -> dict[str, torch.Tensor]:
    """Return the advantages of a batch, its mask and scores, padded."""
    data = queue.fetch(batch.keys, batch.partition_id, ["advantages", queue.MASK, queue.TRAINER_SCORE])
    return {
        "advantages": dense(data["advantages"]),
        "response_mask": dense(data[queue.MASK]),
        "token_level_scores": dense(data[queue.TRAINER_SCORE]),
    }


def _write_token_scores(batch: Any, table: Table, run: Run) -> None:
    """Write `token_level_scores_<key>` into the batch."""
    mask = queue.fetch(batch.keys, batch.partition_id, [queue.MASK])[queue.MASK]
    tokens_of_row = mask.offsets().diff()
    fields = dict(table.token_fields(run.settings.rewards.keys or (), tokens_of_row))
    if fields:
        queue.write(batch.keys, batch.partition_id, fields)
