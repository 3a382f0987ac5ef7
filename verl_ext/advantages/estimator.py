"""Compute advantages with verl's estimator signature.

verl's registry is not modified. An estimator that another package registers under the same name takes precedence,
whether it is registered before or after verl_ext is loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from verl_ext import hooks
from verl_ext.advantages import checkpoint, dump
from verl_ext.advantages.run import CURRENT, Run
from verl_ext.advantages.table import Table, is_number
from verl_ext.core.batch import SCORE, Batch
from verl_ext.core.chain import Chain, plain_state
from verl_ext.core.groups import Array, Index, divide
from verl_ext.core.metrics import advantage_metrics, contribution_metrics, metric_name, reward_metrics, turn_metrics
from verl_ext.core.row_index import float_mask, row_sums, scores
from verl_ext.errors import IntegrationError, listed
from verl_ext.names import is_ours

ZERO_BATCHES = 5
"""The number of consecutive batches without an advantage after which a run is warned."""


def install(core_algos: ModuleType) -> None:
    """Wrap the function by which verl's trainers find an estimator."""
    hooks.member(core_algos, "ADV_ESTIMATOR_REGISTRY")
    hooks.wrap(core_algos, "get_adv_estimator_fn", wrap_lookup)


def wrap_lookup(original: Callable[..., Any], name_or_enum: Any) -> Any:
    """`get_adv_estimator_fn(name_or_enum)`: return our function for a name of ours."""
    name = str(getattr(name_or_enum, "value", name_or_enum))
    return partial(compute, name) if is_ours(name) else original(name_or_enum)


def compute(
    name: str, token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_other: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantages `[B, L]` of the batch that a trainer is computing, twice: verl wants returns as well."""
    run, chain, table = _at_work(name)
    rows, settings = table.rows, run.settings.rewards
    if len(rows.trajectory_of_row) != len(response_mask):
        raise IntegrationError(
            f"The estimator {name!r} was called with {len(response_mask)} of the {len(rows.trajectory_of_row)} rows "
            "of a batch. Pass all rows in the trainer, because advantages depend on the whole batch."
        )
    run.computed_at, run.called = run.step, True
    mask = float_mask(response_mask, token_level_rewards.dtype)  # becomes the result
    tokens, owner = table.tokens(mask), table.owner
    rejected = np.bincount(owner, tokens) == 0
    part: Index | slice = slice(None)
    if settings.rejected == "exclude" and rejected.any():
        part = np.flatnonzero(~rejected[owner])
    advantages = np.zeros(len(owner))
    if len(advantages[part]):
        total = rows.gather(scores(token_level_rewards, mask))  # with the KL term, if there is one
        if not run.settings.kl_in_reward:
            table.score = total
        batch = table.batch(
            settings.keys,
            part,
            tokens=tokens,
            accuracy=_accuracy(run, table) if chain.needs_accuracy else None,
            kl_reward=total - table.trainer_score() if run.settings.kl_in_reward else None,
            fields=chain.needs_fields,
        )
        advantages[part] = _run_chain(run, chain, batch)
        log_rewards(run, table, batch, np.unique(owner[part]))
    if len(rejected):
        run.metrics["advantage/rejected_responses"] = float(np.count_nonzero(rejected))
    result = table.scatter(advantages, mask)
    return result, result


def _at_work(name: str) -> tuple[Run, Chain, Table]:
    """Return the run that computes a batch with this estimator, its steps, and the table of the batch."""
    run = CURRENT.get()
    if run is None or run.name != name or run.chain is None or run.table is None:
        hooks.require()
        raise IntegrationError(
            f"The estimator {name!r} was called outside the advantage step of a trainer that verl_ext has checked. "
            "Use a trainer of trainer.v1.trainer_mode or RayPPOTrainer. In your own code, call "
            f"verl_ext.build({name!r}, settings)(Batch.of(...))."
        )
    return run, run.chain, run.table


def _accuracy(run: Run, table: Table) -> Array:
    """Return the accuracy of each trajectory; raise if earlier batches or the history had another accuracy."""
    settings = run.settings.rewards
    now = {"key": table.accuracy_key(), "threshold": settings.accuracy_threshold}
    checkpoint.require_same_accuracy(run.accuracy, now)
    run.accuracy = now
    return table.accuracy()


def _run_chain(run: Run, chain: Chain, batch: Batch) -> Array:
    """Compute the advantages of a batch `[N]`; keep the new state, log, dump."""
    result = chain(batch, run.state)
    if run.state is None:
        plain_state(result.state)  # raise now, not at the first checkpoint
    run.state = result.state
    if run.settings.verl_ext.dump_dir is not None:
        dump.write(run, batch, result.advantages)
    run.metrics |= advantage_metrics(result.advantages)
    _watch_zero_advantages(run, batch, result.advantages)
    if result.summed is not None:
        rest = batch.kl_reward is not None
        run.metrics |= contribution_metrics(
            batch.reward_names, batch.groups, *result.summed, result.advantages, rest=rest
        )
    if run.needs.turns:
        run.metrics |= turn_metrics(batch)
    run.metrics |= {f"{metric_name(run.name)}/{short}": value for short, value in result.metrics.items()}
    return result.advantages


def _watch_zero_advantages(run: Run, batch: Batch, advantages: Array) -> None:
    """Log a warning if every advantage has been 0 for several batches, because such a run does not learn."""
    run.zero_batches = 0 if advantages.any() else run.zero_batches + 1
    if run.zero_batches < ZERO_BATCHES:
        return
    by_key = batch.by_reward()
    varies = np.any(by_key.groups.varies(by_key.returns), axis=0).tolist()
    constant = [key for key, varying in zip(by_key.keys, varies, strict=True) if not varying]
    reason = f"The rewards {listed(constant)} do not vary in any group." if constant else "The rewards cancel."
    run.warn_once(
        "zero advantages",
        f"Every advantage has been 0 in the last {run.zero_batches} batches, up to step {run.step}, so the model does "
        f"not learn. {reason} Check the curves reward/<key>/mean, the difficulty of the prompts and the sampling "
        "temperature.",
    )


def log_and_dump(run: Run, table: Table, tensors: Callable[[], Mapping[str, torch.Tensor]] | None) -> None:
    """Log the named rewards of a run with an estimator of verl's own, and dump them with verl's advantages.

    Call it after the estimator. `tensors` returns `advantages`, `response_mask` and `token_level_scores`, each
    `[B, L]`; it is called only for a dump, and None if verl has drawn other rows for the update.
    """
    keys, rows = run.settings.rewards.keys, table.rows
    if not len(table.labels):
        return
    batch = None if keys is None else table.batch(keys, counts=False)
    log_rewards(run, table, batch)
    score, shown = table.score, run.name == "grpo" and run.log != "none" and not run.settings.kl_in_reward
    if batch is not None and score is not None and shown:
        groups = batch.groups
        advantages = score - groups.broadcast(groups.mean(score))
        if run.settings.norm_by_std:
            advantages = divide(advantages, groups.broadcast(groups.std(advantages)))
        parts = np.nan_to_num(batch.returns)
        run.metrics |= contribution_metrics(batch.reward_names, groups, parts, score, advantages, rest=True)
    if batch is not None and run.settings.verl_ext.dump_dir is not None and tensors is not None:
        given = tensors()
        mask = float_mask(given["response_mask"], torch.float32)
        tokens = row_sums(mask)
        # A critic's advantages differ from token to token: the mean over the tokens.
        sums = (given["advantages"].float() * mask).sum(dim=-1).double().cpu().numpy()
        advantages, total = rows.gather(divide(sums, tokens)), rows.gather(scores(given["token_level_scores"], mask))
        dump.write(run, replace(batch, lengths=rows.total(tokens)), advantages, total=total)


def log_rewards(run: Run, table: Table, batch: Batch | None = None, part: Index | slice = slice(None)) -> None:
    """Add the metrics of the rewards in `batch`, and of the others if all are logged; of a part of the responses."""
    for key, entries in table.entries.items():
        missing = np.bincount(table.owner) - entries
        for name, count in {"truncated": -missing, "missing": missing}.items():
            run.metrics[f"reward/{metric_name(key)}/{name}_entries"] = float(count.clip(0).sum())
        if not entries.any():
            text = (
                f"The reward {key!r} has no entry for any turn of a whole batch. Return one number per turn, or "
                "remove it from algorithm.rewards.per_turn."
            )
            run.warn_once(f"no entries: {key}", text)
    if run.log == "none":
        return
    keys: tuple[str, ...] = ()
    if batch is not None:
        run.metrics |= reward_metrics(batch)
        keys = batch.reward_of_column
    others = []
    returned = (table.returned or ()) if run.log == "all" else ()
    if SCORE in returned and SCORE not in keys:
        run.metrics |= reward_metrics(replace(table, spans=None).batch(None, part, counts=False))
    for name in returned:
        if name in (*keys, SCORE):
            continue
        if isinstance(name, str) and all(value is None or is_number(value) for value in table.fields[name]):
            others.append(name)
        else:
            text = f"The component {name!r} of the reward function has no metrics, because it is not always a number."
            run.warn_once(f"no curve: {name}", text)
    if others:
        run.metrics |= reward_metrics(replace(table, spans=None).batch(others, part, counts=False))
