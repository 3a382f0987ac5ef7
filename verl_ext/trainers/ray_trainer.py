"""verl's `RayPPOTrainer` (`trainer.use_v1=False`).

There `compute_advantage(data, ...)` has the rewards in `data.non_tensor_batch`, but verl passes them to `gdpo` only.
The metrics of a step are a local variable of `fit`, which calls `compute_data_metrics` in every step.
"""

import sys
from collections.abc import Callable, Hashable
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakSet

from verl_ext import hooks
from verl_ext.advantages.estimator import log_and_dump
from verl_ext.advantages.prompts import FIELDS, naming_prompts
from verl_ext.advantages.run import CURRENT, Run
from verl_ext.advantages.table import of_batch
from verl_ext.trainers.mixin import WithEstimators

RUNS: WeakSet[Run] = WeakSet()
"""The runs of this process's trainers."""


def install(ray_trainer: ModuleType) -> None:
    """Wrap the module's functions and put our class in the place of `RayPPOTrainer`."""
    hooks.put_over(ray_trainer, RayTrainer)
    hooks.wrap(ray_trainer, "compute_advantage", wrap_compute_advantage)
    hooks.wrap(ray_trainer, "compute_data_metrics", wrap_compute_data_metrics)


class RayTrainer(WithEstimators):
    """`RayPPOTrainer` with this package's part."""

    local_trigger_step = 0
    """The update within a step, of which this trainer makes one."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self._verl_ext is not None:
            RUNS.add(self._verl_ext)


def of_caller(*given: Any) -> Run | None:
    """Return the run of the trainer whose method calls: verl's functions get no trainer, so the stack names it.

    In another thread there is none: then it is the run whose section `algorithm` is among the arguments.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        trainer = frame.f_locals.get("self")
        if isinstance(trainer, RayTrainer):
            return trainer._verl_ext
        frame = frame.f_back
    runs = [run for run in RUNS if any(run.trainer.config.algorithm is value for value in given)]
    return runs[0] if len(runs) == 1 else None


def wrap_compute_advantage(original: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """`compute_advantage(data, ...)`: compute with the rewards of the batch."""
    if CURRENT.get() is not None:  # the default trainer calls it, too; its run has a table already
        return original(data, *args, **kwargs)
    run = of_caller(*args, *kwargs.values())
    if run is None or "uid" not in data.non_tensor_batch:
        return original(data, *args, **kwargs)
    fields, mask = data.non_tensor_batch, data.batch["response_mask"]
    uids = fields["uid"].tolist()
    returned = data.meta_info.get("reward_extra_keys")

    def fields_of(uid: Hashable) -> dict[str, Any]:
        row = uids.index(uid)
        return {name: fields[name][row] for name in FIELDS if name in fields}

    with naming_prompts(fields_of):
        table = of_batch(fields, data.batch, uids, mask, run.needs, returned=returned)
        if run.settings.rewards.token_scores:
            lengths = data.batch["attention_mask"][:, -mask.shape[1] :].sum(dim=1)
            for name, values in table.token_fields(run.settings.rewards.keys or (), lengths):
                data.batch[name] = values.to_padded_tensor(0.0, mask.shape)
        with run.computing(table):
            result = original(data, *args, **kwargs)
        run.require_called()
        if run.chain is None:
            # `use_pf_ppo` returns a new batch of rows that were resampled from this one.
            log_and_dump(run, table, None if result is not data else lambda: data.batch)
    return result


def wrap_compute_data_metrics(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """`compute_data_metrics(batch, ...)`: add our metrics, since those of the step are local to `fit`.

    Some trainers call it several times in a step, for example for a part of the batch.
    """
    metrics, run = original(batch, *args, **kwargs), of_caller()
    if run is not None:
        run.add_metrics_of_step(metrics)
    return metrics
