"""Hooks into verl's default (V1) trainer: give the estimators named rewards, padding and sessions, and log metrics.

Follows `PPOTrainer._compute_advantage` of verl 0.9.0 and 0.9.1, which does not fetch the reward components or the
padding tags from TransferQueue.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch

from verl_ext.core.rows import Rows
from verl_ext.errors import IntegrationError
from verl_ext.integration.advantage.components import Components
from verl_ext.integration.advantage.context import StepContext, activate, current
from verl_ext.integration.advantage.watched import watch
from verl_ext.integration.compat import contract
from verl_ext.integration.guards import failures, guard, workers
from verl_ext.integration.trainers import attach, dynamic_sampling, rollout_data
from verl_ext.integration.trainers.attach import TrainerRun
from verl_ext.run import use_run_state

logger = logging.getLogger("verl_ext")

MISSING = "advantage/missing_responses"
"""Metric: the number of expected responses that did not arrive."""


def install(trainer_base: ModuleType) -> None:
    """Wrap `PPOTrainer`; registered trainers and third-party subclasses inherit from it."""
    contract.require("verl.trainer.ppo.v1.trainer_base", trainer_base)
    own = {
        "_compute_advantage": wrap_compute_advantage,
        "_build_replay_buffer": lambda original: wrap_build_replay_buffer(dynamic_sampling.wrap_build(original)),
    }
    attach.adopt(trainer_base.PPOTrainer, {**attach.WRAPPERS, **own})


def wrap_compute_advantage(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_compute_advantage(self, batch, metrics)`, in a context from which the estimator gets the batch."""

    def _compute_advantage(self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
        run, outer = attach.required_run(self), current()
        if run is None or not run.watches or (outer is not None and outer.trainer is self):
            return original(self, batch, metrics)
        padding = np.array([bool(tag.get("is_padding", False)) for tag in batch.tags], dtype=bool)
        rows = Rows.of_sessions(batch.keys, padding)
        missing = missing_responses(self, len(rows.scored), run)
        components = rollout_data.fetch_components(batch, rows, run)
        context = StepContext(trainer=self, run=run, rows=rows, components=components)
        if run.settings.rewards.token_scores:
            write_token_scores(batch, rows, components, run)
        with use_run_state(run.state), activate(context):
            result = original(self, batch, metrics)
        if run.ours and not context.used:
            raise IntegrationError(
                f"{type(self).__qualname__}._compute_advantage did not call the estimator {run.name!r}: it overrides "
                "verl's without using verl's registry of estimators"
            )
        if not run.ours:
            tensors = functools.partial(dense_tensors, batch)
            context.metrics |= watch(run, rows, components, tensors, trainer=self, state=run.state)
        metrics.update(context.metrics)
        metrics[MISSING] = missing
        return result

    return _compute_advantage


def wrap_build_replay_buffer(original: Callable[..., Any]) -> Callable[..., Any]:
    """`PPOTrainer._build_replay_buffer(self)`: install the guard of the rollouts for our estimators."""

    def _build_replay_buffer(self: Any, *args: Any, **kwargs: Any) -> Any:
        buffer, run = original(self, *args, **kwargs), attach.run_of(self)
        if run is not None and run.ours:
            own = run.settings.verl_ext
            guard.attempt("watch_rollouts", own, failures.watch_buffer, buffer, self, own)
        return buffer

    return _build_replay_buffer


def missing_responses(trainer: Any, found: int, run: TrainerRun) -> float:
    """How many of the expected responses are missing; log a warning if there are any.

    In `sync` mode verl trains on the responses that are left when others fail: groups get smaller, or vanish. With an
    estimator of ours, raise if a worker has died.
    """
    config = trainer.config
    updates = getattr(trainer, "parameter_sync_step", 1)
    expected = config.data.train_batch_size // updates * config.actor_rollout_ref.rollout.n
    missing = max(0, expected - found)
    if missing and run.ours:
        why = f"step {trainer.global_steps}: {missing} responses are missing"
        guard.attempt("watch_rollouts", run.settings.verl_ext, workers.require_alive, trainer, why)
    if missing:
        logger.warning(
            "step %d: %d of %d responses are missing (metric %s); verl trains on the rest. To replace prompts without "
            "any response set trainer.v1.sampler.sync_refill_failed_groups=True data.gen_batch_size=1",
            trainer.global_steps,
            missing,
            expected,
            MISSING,
        )
    return float(missing)


def dense_tensors(batch: Any) -> dict[str, torch.Tensor]:
    """The advantages of a batch, its mask and scores, padded."""
    data = rollout_data.read(batch.keys, batch.partition_id, ["advantages", "response_mask", "rm_scores"])
    return {
        "advantages": rollout_data.dense(data["advantages"]),
        "response_mask": rollout_data.dense(data["response_mask"]),
        "token_level_scores": rollout_data.dense(data["rm_scores"]),
    }


def write_token_scores(batch: Any, rows: Rows, components: Components, run: TrainerRun) -> None:
    """Write `token_level_scores_<key>` into the batch: each reward on the last token of its response, 0 elsewhere."""
    mask = rollout_data.read(batch.keys, batch.partition_id, ["response_mask"])["response_mask"]
    lengths = mask.offsets().diff()
    fields = components.token_fields(run.settings.rewards.keys or (), rows)
    if out := {name: on_last_token(values, lengths) for name, values in fields}:
        rollout_data.write(batch.keys, batch.partition_id, out)


def on_last_token(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """`[B]` values as a nested tensor with one row per response and the value on its last token."""
    ends = lengths.cumsum(0)
    flat = torch.zeros(int(ends[-1]) if len(ends) else 0, dtype=values.dtype)
    has_tokens = lengths > 0
    flat[ends[has_tokens] - 1] = values[has_tokens]
    return torch.nested.nested_tensor_from_jagged(flat, torch.nn.functional.pad(ends, (1, 0)))
