"""verl's `RayPPOTrainer` (`trainer.use_v1=False`), and the experimental trainers that are built on it.

There `compute_advantage(data, ...)` has the rewards in `data.non_tensor_batch`, but verl passes them to `gdpo` only.
The metrics of a step are a local variable of `fit`, which calls `compute_data_metrics` in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_ext.integration import checkpoint, components, hooks, skip
from verl_ext.integration.advantage import watch
from verl_ext.integration.run import current, wrap_init


def install(ray_trainer: ModuleType) -> None:
    """Wrap the module's functions and `RayPPOTrainer`; a module that imports them later gets the wrappers."""
    hooks.wrap(ray_trainer, "compute_advantage", wrap_compute_advantage)
    hooks.wrap(ray_trainer, "compute_data_metrics", wrap_compute_data_metrics)
    hooks.adopt(
        hooks.member(ray_trainer, "RayPPOTrainer"),
        {
            "__init__": wrap_init,
            "_update_actor": wrap_update_actor,
            "_save_checkpoint": checkpoint.wrap_save,
            "_load_checkpoint": checkpoint.wrap_load,
        },
    )


def install_separation(separation: ModuleType) -> None:
    """Wrap what the experimental trainers import of their own, past `verl.trainer.ppo.ray_trainer`."""
    hooks.wrap(separation, "compute_data_metrics", wrap_compute_data_metrics)


def install_fully_async(fully_async: ModuleType) -> None:
    """Wrap `FullyAsyncTrainer.load_checkpoint`: this Ray actor does not call `_load_checkpoint`."""
    cls = hooks.member(fully_async, "FullyAsyncTrainer").__ray_metadata__.modified_class
    hooks.wrap(cls, "load_checkpoint", checkpoint.wrap_async_load)


def wrap_compute_advantage(original: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """`compute_advantage(data, ...)`: compute with the rewards of the batch.

    The default trainer calls it, too; there the run reads the rewards from TransferQueue.
    """
    run = current()
    uids = data.non_tensor_batch.get("uid")
    if run.rewards is not None or uids is None or not run.watches:
        return original(data, *args, **kwargs)
    mask, returned = data.batch["response_mask"], data.meta_info.get("reward_extra_keys", ())
    rewards = components.of_batch(data.non_tensor_batch, data.batch, uids.tolist(), mask, run.needs, returned=returned)
    if run.settings.rewards.token_scores:
        lengths = data.batch["attention_mask"][:, -mask.shape[1] :].sum(dim=1)
        for name, values in rewards.token_fields(run.settings.rewards.keys or (), lengths):
            data.batch[name] = values.to_padded_tensor(0.0, mask.shape)
    with run.computing(rewards):
        result = original(data, *args, **kwargs)
    if run.watches and not run.ours:
        # `use_pf_ppo` returns a new batch of rows drawn from this one.
        watch(run, rewards, None if result is not data else lambda: data.batch)
    return result


def wrap_update_actor(original: Callable[..., Any], self: Any, batch: Any) -> Any:
    """`_update_actor(self, batch)`: ask for rows without advantage to be left out."""
    metrics_of = lambda output: output.meta_info["metrics"]  # noqa: E731
    return skip.update(self, batch.meta_info, lambda: original(self, batch), metrics_of)


def wrap_compute_data_metrics(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`compute_data_metrics(batch, ...)`: add our metrics, since those of the step are local to `fit`."""
    metrics, run = original(*args, **kwargs), current()
    run.require_called()
    run.add_metrics(metrics)
    return metrics
