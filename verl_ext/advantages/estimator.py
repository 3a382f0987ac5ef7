"""Compute advantages with verl's estimator signature.

verl's registry is not modified. An estimator that another package registers under the same name takes precedence if it
is registered before the trainer starts. If it is registered later, the next step raises an error.

verl passes an estimator neither the trainer nor the named rewards. So the trainer reads the rewards into a `Table` and
calls verl's advantage step within `computing(run, table)`. verl then calls `compute`, which finds both in `CURRENT`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from verl_ext import hooks
from verl_ext.advantages import checkpoint, dump
from verl_ext.advantages.log import log_advantages, log_rewards
from verl_ext.advantages.table import ALL, Table
from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain, plain_state
from verl_ext.core.groups import Array, Index
from verl_ext.core.row_index import float_mask, scores
from verl_ext.errors import IntegrationError
from verl_ext.run import Run
from verl_ext.run_config import computed_by_verl_ext

CURRENT: ContextVar[tuple[Run, Table] | None] = ContextVar("verl_ext_current", default=None)
"""The run whose advantages are being computed, with the rewards of the batch."""


def install(core_algos: ModuleType) -> None:
    """Wrap the function with which verl's trainers find an estimator."""
    hooks.member(core_algos, "ADV_ESTIMATOR_REGISTRY")
    hooks.wrap(core_algos, "get_adv_estimator_fn", wrap_lookup)


def wrap_lookup(original: Callable[..., Any], name_or_enum: Any) -> Any:
    """`get_adv_estimator_fn(name_or_enum)`: return verl_ext's function for an estimator of verl_ext."""
    name = str(getattr(name_or_enum, "value", name_or_enum))
    return partial(compute, name) if computed_by_verl_ext(name) else original(name_or_enum)


@contextmanager
def computing(run: Run, table: Table) -> Iterator[None]:
    """Let the estimator that verl calls in the block compute for this run and with these rewards."""
    run.require_unchanged()
    run.estimator_called = False
    token = CURRENT.set((run, table))
    try:
        yield
    finally:
        CURRENT.reset(token)


def compute(
    name: str, token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_other: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantages `[B, L]` of the batch, twice, because verl wants returns as well.

    `token_level_rewards` `[B, L]` is the trainer's score with the KL term, if there is one.
    """
    run, chain, table = _current(name)
    _require_all_rows(name, table, response_mask)
    run.computed_at = run.step
    run.estimator_called = True
    mask = float_mask(response_mask, token_level_rewards.dtype)  # new memory, over which the result is written
    tokens = table.tokens(mask)  # [N]
    trajectory_of_segment = table.trajectory_of_segment  # [N]
    # [T] The response is empty, or rollout correction has rejected it and emptied its mask.
    has_no_tokens = np.bincount(trajectory_of_segment, tokens) == 0
    included_trajectories: Index | slice = ALL
    included_segments: Index | slice = ALL
    if run.settings.rewards.rejected == "exclude" and has_no_tokens.any():
        included_trajectories = np.flatnonzero(~has_no_tokens)
        included_segments = np.flatnonzero(~has_no_tokens[trajectory_of_segment])
    advantages = np.zeros(len(trajectory_of_segment))
    has_included_segments = len(advantages[included_segments]) > 0
    if has_included_segments:
        score = table.row_index.gather(scores(token_level_rewards, mask))  # [T], with the KL term, if there is one
        kl_reward = None
        if run.settings.kl_in_reward:
            kl_reward = score - table.trainer_score()  # of the last row of each trajectory, which has the score
        else:
            table = replace(table, score=score)
        batch = table.batch(
            run.settings.rewards.keys,
            included_segments,
            tokens=tokens,
            accuracy=_accuracy(run, table) if chain.needs_accuracy else None,
            kl_reward=kl_reward,
            fields=chain.needs_fields,
        )
        advantages[included_segments] = _run_chain(run, chain, batch)
        log_rewards(run, table, batch, included_trajectories)
    if len(has_no_tokens):
        run.metrics["advantage/rejected_responses"] = float(np.count_nonzero(has_no_tokens))
    result = table.scatter(advantages, mask)
    return result, result


def _require_all_rows(name: str, table: Table, response_mask: torch.Tensor) -> None:
    """Raise if a trainer calls the estimator with a part of the batch that `table` was read from."""
    rows = len(table.row_index.trajectory_of_row)
    if len(response_mask) != rows:
        raise IntegrationError(
            f"The estimator {name!r} was called with {len(response_mask)} of the {rows} rows of a batch. Pass "
            "all rows in the trainer, because advantages depend on the whole batch."
        )


def _current(name: str) -> tuple[Run, Chain, Table]:
    """Return the run for which a trainer is computing advantages with this estimator, its chain and the rewards."""
    current = CURRENT.get()
    if current is not None:
        run, table = current
        if run.name == name and run.chain is not None:
            return run, run.chain, table
    hooks.require()
    raise IntegrationError(
        f"The estimator {name!r} was called outside the advantage step of a trainer that verl_ext has checked. "
        "Use a trainer of trainer.v1.trainer_mode or RayPPOTrainer. In your own code, call "
        f"verl_ext.build({name!r}, settings)(Batch.of(...))."
    )


def _accuracy(run: Run, table: Table) -> Array:
    """Return the accuracy of each trajectory. Raise if earlier batches or the history had another accuracy."""
    accuracy_now = {"key": table.accuracy_key(), "threshold": run.settings.rewards.accuracy_threshold}
    checkpoint.require_same_accuracy(run.accuracy, accuracy_now)
    run.accuracy = accuracy_now
    return table.accuracy()


def _run_chain(run: Run, chain: Chain, batch: Batch) -> Array:
    """Compute the advantages of a batch `[N]`. Keep the new state, dump and log."""
    result = chain(batch, run.state)
    if run.state is None:
        plain_state(result.state)  # raise now, not at the first checkpoint
    run.state = result.state
    if run.settings.verl_ext.dump_dir is not None:
        dump.write(run, batch, result.advantages)
    log_advantages(run, batch, result)
    return result.advantages
