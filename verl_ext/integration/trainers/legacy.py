"""Hooks into verl's legacy trainer (`trainer.use_v1=False`) and the experimental trainers that are built on it.

Follows `verl.trainer.ppo.ray_trainer` of verl 0.9.0 and 0.9.1. There `compute_advantage(data, ...)` has the components
in `data.non_tensor_batch`, but passes them to `gdpo` only. The step's metrics are a local variable of
`RayPPOTrainer.fit`, which calls `compute_data_metrics` in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from verl_ext.core.groups import Groups
from verl_ext.core.rows import Rows, scores
from verl_ext.errors import IntegrationError
from verl_ext.integration.advantage.components import Components
from verl_ext.integration.advantage.context import Fit, StepContext, activate, current, fit, fitting
from verl_ext.integration.advantage.watched import watch
from verl_ext.integration.compat import contract, hooks
from verl_ext.integration.compat.names import SCORE
from verl_ext.integration.trainers import attach
from verl_ext.run import use_run_state


def install(ray_trainer: ModuleType) -> None:
    """Wrap the module's functions and `RayPPOTrainer`; a module that imports them later gets the wrappers."""
    contract.require("verl.trainer.ppo.ray_trainer", ray_trainer)
    hooks.wrap(ray_trainer, "compute_advantage", wrap_compute_advantage)
    hooks.wrap(ray_trainer, "compute_data_metrics", wrap_compute_data_metrics)
    own = {**attach.WRAPPERS, "_fit_compute_advantage": wrap_fit_compute_advantage}
    attach.adopt(ray_trainer.RayPPOTrainer, own)


def install_separation(separation: ModuleType) -> None:
    """Check the experimental trainers; `attach.adopt` wrapped their classes when they were defined."""
    contract.require("verl.experimental.separation.ray_trainer", separation)


def install_fully_async(fully_async: ModuleType) -> None:
    """Wrap `FullyAsyncTrainer.load_checkpoint`: this Ray actor does not call `_load_checkpoint`."""
    contract.require("verl.experimental.fully_async_policy.fully_async_trainer", fully_async)
    cls = fully_async.FullyAsyncTrainer.__ray_metadata__.modified_class
    hooks.wrap(cls, "load_checkpoint", wrap_async_load)


def wrap_async_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """`load_checkpoint(self)`: load our state after verl's."""

    async def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> Any:
        attach.before_load(self)
        result = await original(self, *args, **kwargs)
        attach.load_state(self)
        return result

    return load_checkpoint


def wrap_compute_advantage(original: Callable[..., Any]) -> Callable[..., Any]:
    """`compute_advantage(data, ...)`, in a context from which the estimator gets the batch, for every trainer."""

    def compute_advantage(data: Any, *args: Any, **kwargs: Any) -> Any:
        context, around = current(), fitting()
        if context is not None:  # the V1 trainer's
            context.tensors, context.fields = data.batch, data.non_tensor_batch
            return original(data, *args, **kwargs)
        run = attach.required_run(around.trainer) if around is not None else None
        if around is None or run is None:
            with activate(StepContext(fields=data.non_tensor_batch, tensors=data.batch)):
                return original(data, *args, **kwargs)
        if not run.watches:
            return original(data, *args, **kwargs)
        context = StepContext(
            trainer=around.trainer,
            run=run,
            fields=data.non_tensor_batch,
            # A copy, because `_write_token_scores` adds fields that are not a process reward model's.
            tensors=dict(data.batch.items()),
        )
        named = None if run.ours and not run.settings.rewards.token_scores else _components(context, data)
        if named is not None and run.settings.rewards.token_scores:
            _write_token_scores(data, *named, run)
        with use_run_state(run.state), activate(context):
            result = original(data, *args, **kwargs)
        if named is not None and not run.ours:
            # `use_pf_ppo` returns a new batch of rows drawn from this one.
            tensors = None if result is not data else lambda: data.batch
            context.metrics |= watch(run, *named, tensors, trainer=around.trainer, state=run.state)
        around.metrics.update(context.metrics)
        return result

    return compute_advantage


def _components(context: StepContext, data: Any) -> tuple[Rows, Components]:
    """The rows and named rewards of a batch."""
    mask, uids = data.batch["response_mask"], data.non_tensor_batch["uid"].tolist()
    rows = Rows.of_groups(Groups.of(uids), mask)
    # The batch's score, unless the reward function returns a component of that name.
    fields = {SCORE: scores(data.batch["token_level_scores"], mask), **(context.fields or {})}
    return rows, Components.of_batch(rows, rows.labels(uids), mask, fields, context.tensors)


def _write_token_scores(data: Any, rows: Rows, components: Components, run: attach.TrainerRun) -> None:
    """Write `token_level_scores_<key>`: each reward on the last token of its response, 0 elsewhere."""
    mask = data.batch["response_mask"]
    every, last = last_tokens(data.batch, mask)
    for name, values in components.token_fields(run.settings.rewards.keys or (), rows):
        field = torch.zeros(mask.shape, dtype=torch.float32)
        field[every, last] = values[every]
        data.batch[name] = field


def last_tokens(tensors: Any, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows with a response, and the position of its last token; the response mask may be 0 there."""
    width = mask.shape[1]
    present = (tensors["attention_mask"][:, -width:] if "attention_mask" in tensors else mask).bool()
    rows = present.any(dim=1).nonzero()[:, 0]
    return rows, width - 1 - present[rows].flip(1).to(torch.uint8).argmax(dim=1)


def wrap_compute_data_metrics(original: Callable[..., Any]) -> Callable[..., Any]:
    """`compute_data_metrics(batch, ...)`: add our metrics, since those of the step are local to `fit`."""

    def compute_data_metrics(*args: Any, **kwargs: Any) -> Any:
        metrics, around = original(*args, **kwargs), fitting()
        if around is not None:
            _require_computed(around)
            metrics.update(around.metrics)
            around.metrics.clear()
        return metrics

    return compute_data_metrics


def wrap_fit_compute_advantage(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_fit_compute_advantage(self, batch)` of the experimental trainers: add our metrics to `self.metrics`."""

    def _fit_compute_advantage(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with fit(self, attach.is_ours) as around:
            result = original(self, batch, *args, **kwargs)
        _require_computed(around)
        self.metrics.update(around.metrics)
        return result

    return _fit_compute_advantage


def _require_computed(around: Fit) -> None:
    """Raise if the trainer computed advantages without the run's estimator."""
    run = attach.run_of(around.trainer)
    if run is not None and run.ours and not around.computed:
        raise IntegrationError(
            f"{type(around.trainer).__qualname__} did not call the estimator {run.name!r}: its advantages are computed "
            "without verl's compute_advantage"
        )
