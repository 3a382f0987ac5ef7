"""verl's `RayPPOTrainer` (`trainer.use_v1=False`).

verl's `compute_advantage(data, ...)` has the rewards in `data.non_tensor_batch`, but verl passes them to `gdpo` only.
The metrics of a step are a local variable of `fit`, which calls `compute_data_metrics` in every step.
"""

import sys
from collections.abc import Callable, Hashable
from types import FrameType, ModuleType
from typing import Any
from weakref import WeakSet

from verl_ext import hooks
from verl_ext.advantages import data_proto
from verl_ext.advantages.estimator import CURRENT, computing
from verl_ext.advantages.log import record_step_of_verl_estimator
from verl_ext.advantages.prompts import FIELDS, naming_prompts
from verl_ext.advantages.table import Request, Table
from verl_ext.errors import IntegrationError
from verl_ext.run import Run
from verl_ext.trainers.mixin import (
    REQUIRED_METHODS,
    TrainerMixin,
    UnsupportedTrainer,
    require_same_parameters,
    with_mixin,
)

RUNS: WeakSet[Run] = WeakSet()
"""The runs of this process's trainers."""


def install(ray_trainer: ModuleType) -> None:
    """Wrap the module's functions, and replace `RayPPOTrainer`, so that subclasses of other packages have the mixin."""
    verl_trainer = hooks.member(ray_trainer, "RayPPOTrainer")
    try:
        require_same_parameters(RayTrainer, verl_trainer, REQUIRED_METHODS)
    except IntegrationError:
        hooks.replace(ray_trainer, "RayPPOTrainer", with_mixin(UnsupportedTrainer, verl_trainer))
        raise
    hooks.replace(ray_trainer, "RayPPOTrainer", with_mixin(RayTrainer, verl_trainer))
    hooks.wrap(ray_trainer, "compute_advantage", wrap_compute_advantage)
    hooks.wrap(ray_trainer, "compute_data_metrics", wrap_compute_data_metrics)


class RayTrainer(TrainerMixin):
    """What verl_ext adds to `RayPPOTrainer`."""

    local_trigger_step = 0
    """The number of the update within its step. It is always 0, because this trainer makes one update per step."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if self._verl_ext is not None:
            RUNS.add(self._verl_ext)


def run_of_caller(*arguments: Any) -> Run | None:
    """Return the run of the trainer that calls verl's function with these arguments.

    verl's functions get no trainer, so this function walks over the stack of callers to the first method of a trainer.
    If the stack has no trainer, for example in another thread, the run is the one whose section `algorithm` is among
    the arguments. The section alone cannot name the run, because some trainers pass a copy of their section, or none.
    It would also name the run of a trainer that does not compute its advantages with verl's functions, which must be
    rejected.

    Up to Python 3.12, `f_locals` is a copy of the variables that stays in the frame. It keeps the last batch of `fit`
    in memory until the next call of this function, so the stack is read only if this process has a run.
    """
    if not RUNS:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, RayTrainer):
            return caller._verl_ext
        frame = frame.f_back
    sections = [id(argument) for argument in arguments]
    runs = [run for run in RUNS if id(run.trainer.config.algorithm) in sections]
    return runs[0] if len(runs) == 1 else None


def wrap_compute_advantage(original: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """`compute_advantage(data, ...)`: compute with the rewards of the batch."""
    if CURRENT.get() is not None:  # the default trainer calls it, too, and has read the rewards already
        return original(data, *args, **kwargs)
    run = run_of_caller(*args, *kwargs.values())
    if run is None:
        return original(data, *args, **kwargs)
    if data_proto.UID not in data.non_tensor_batch:
        if run.chain is not None:
            raise IntegrationError(
                f"The estimator {run.name!r} groups responses by prompt, but the batch has no field 'uid'. Set "
                "batch.non_tensor_batch['uid'] in the trainer, as RayPPOTrainer.fit does."
            )
        return original(data, *args, **kwargs)

    def fields_of_prompt(uid: Hashable) -> dict[str, Any]:
        fields = data.non_tensor_batch
        first_row = fields[data_proto.UID].tolist().index(uid)
        return {name: fields[name][first_row] for name in FIELDS if name in fields}

    with naming_prompts(fields_of_prompt):
        table = data_proto.read_table(data, Request.of(run))
        if run.settings.rewards.token_scores:
            _write_token_scores(data, table, run)
        with computing(run, table):
            result = original(data, *args, **kwargs)
        run.require_estimator_called()
        if run.chain is None:
            # `use_pf_ppo` returns a new batch of rows that were resampled from this batch.
            record_step_of_verl_estimator(run, table, None if result is not data else lambda: data.batch)
    return result


def _write_token_scores(data: Any, table: Table, run: Run) -> None:
    """Write `token_level_scores_<key>` into the batch."""
    shape = data.batch[data_proto.MASK].shape
    attention_of_response = data.batch[data_proto.ATTENTION][:, -shape[1] :]
    tokens_of_row = attention_of_response.sum(dim=1)
    for name, values in table.token_fields(run.settings.rewards.keys or (), tokens_of_row):
        data.batch[name] = values.to_padded_tensor(0.0, shape)


def wrap_compute_data_metrics(original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """`compute_data_metrics(batch, ...)`: add the metrics of verl_ext, because those of the step are local to `fit`.

    Some trainers call the function several times in a step, for example for a part of the batch. The default trainer
    calls it, too, and then there is no run: `DefaultTrainer` adds its metrics itself.
    """
    metrics = original(batch, *args, **kwargs)
    run = run_of_caller()
    if run is not None:
        run.add_metrics_of_step(metrics)
    return metrics
