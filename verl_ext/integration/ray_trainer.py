"""verl's `RayPPOTrainer` (`trainer.use_v1=False`), and the experimental trainers that are built on it.

There `compute_advantage(data, ...)` has the rewards in `data.non_tensor_batch`, but verl passes them to `gdpo` only.
The metrics of a step are a local variable of `fit`, which calls `compute_data_metrics` in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from verl_ext.core.groups import Groups
from verl_ext.integration import checkpoint, components, hooks, skip
from verl_ext.integration.advantage import watch
from verl_ext.integration.components import Components
from verl_ext.integration.run import Run, current, wrap_init


def install(ray_trainer: ModuleType) -> None:
    """Wrap the module's functions and `RayPPOTrainer`; a module that imports them later gets the wrappers."""
    hooks.wrap(ray_trainer, "compute_advantage", wrap_compute_advantage, takes=("data", "adv_estimator"))
    hooks.wrap(ray_trainer, "compute_data_metrics", wrap_compute_data_metrics, takes=("batch",))
    hooks.adopt(
        hooks.member(ray_trainer, "RayPPOTrainer"),
        {
            "__init__": (wrap_init, ("self", "config")),
            "_update_actor": (wrap_update_actor, ("self", "batch")),
            "_save_checkpoint": (checkpoint.wrap_save, ("self",)),
            "_load_checkpoint": (checkpoint.wrap_load, ("self",)),
        },
    )


def install_fully_async(fully_async: ModuleType) -> None:
    """Wrap `FullyAsyncTrainer.load_checkpoint`: this Ray actor does not call `_load_checkpoint`."""
    cls = hooks.member(fully_async, "FullyAsyncTrainer").__ray_metadata__.modified_class
    hooks.wrap(cls, "load_checkpoint", checkpoint.wrap_async_load, takes=("self",))


def wrap_compute_advantage(original: Callable[..., Any]) -> Callable[..., Any]:
    """`compute_advantage(data, ...)`: compute with the rewards of the batch.

    The default trainer calls it, too; there the run reads the rewards from TransferQueue.
    """

    def compute_advantage(data: Any, *args: Any, **kwargs: Any) -> Any:
        run = current()
        if run.read is not None or not (run.watches or run.trainer is None):
            return original(data, *args, **kwargs)
        # Not the names that `_write_token_scores` adds: those are not a process reward model's.
        names = frozenset(map(str, data.batch.keys()))
        returned = data.meta_info.get("reward_extra_keys", ())
        read = partial(components.of_batch, data.non_tensor_batch, data.batch, names=names, returned=returned)
        own = run.settings.rewards
        rewards = _rewards(read, data) if own.token_scores or not (run.ours or run.trainer is None) else None
        if own.token_scores and rewards is not None:
            _write_token_scores(data, rewards, run)
        with run.computing(read):
            result = original(data, *args, **kwargs)
        if rewards is not None and not run.ours:
            # `use_pf_ppo` returns a new batch of rows drawn from this one.
            watch(run, rewards, None if result is not data else lambda: data.batch)
        return result

    return compute_advantage


def wrap_update_actor(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_update_actor(self, batch)`: ask for rows without advantage to be left out."""

    def _update_actor(self: Any, batch: Any) -> Any:
        metrics_of = lambda output: output.meta_info["metrics"]  # noqa: E731
        return skip.update(self, batch.meta_info, lambda: original(self, batch), metrics_of)

    return _update_actor


def wrap_compute_data_metrics(original: Callable[..., Any]) -> Callable[..., Any]:
    """`compute_data_metrics(batch, ...)`: add our metrics, since those of the step are local to `fit`."""

    def compute_data_metrics(*args: Any, **kwargs: Any) -> Any:
        metrics, run = original(*args, **kwargs), current()
        run.require_called(0)
        run.add_metrics(metrics)
        return metrics

    return compute_data_metrics


def _rewards(read: Callable[..., Components], data: Any) -> Components:
    """Read the rewards of a batch."""
    uids = data.non_tensor_batch["uid"].tolist()
    return read(uids, Groups.of(uids), data.batch["response_mask"])


def _write_token_scores(data: Any, rewards: Components, run: Run) -> None:
    """Write `token_level_scores_<key>`: each reward on the last token of its response, 0 elsewhere."""
    mask = data.batch["response_mask"]
    every, last_token = last_tokens(data.batch, mask)
    for name, values in rewards.token_fields(run.settings.rewards.keys or ()):
        field = torch.zeros(mask.shape, dtype=torch.float32)
        field[every, last_token] = values[every]
        data.batch[name] = field


def last_tokens(tensors: Any, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows with a response, and the position of its last token; the response mask may be 0 there."""
    width = mask.shape[1]
    present = (tensors["attention_mask"][:, -width:] if "attention_mask" in tensors else mask).bool()
    rows = present.any(dim=1).nonzero()[:, 0]
    return rows, width - 1 - present[rows].flip(1).to(torch.uint8).argmax(dim=1)
