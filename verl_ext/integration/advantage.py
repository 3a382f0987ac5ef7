"""Compute advantages in verl's convention, for the names that verl finds here: those that nobody has registered.

verl's registry stays as it is, so a name that somebody registers, before or after this package, is his.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import torch

from verl_ext.core.batch import Batch, unit_accuracy
from verl_ext.core.chain import Chain, plain_state
from verl_ext.core.groups import Array, Index, divide
from verl_ext.core.metrics import advantage_metrics, metric_name, reward_metrics, turn_metrics
from verl_ext.core.rows import broadcast, float_mask, row_sums, scores
from verl_ext.core.turns import Turns
from verl_ext.errors import DataError, IntegrationError
from verl_ext.integration import checkpoint, dump, hooks
from verl_ext.integration.components import SCORE, Components
from verl_ext.integration.run import CURRENT, Run
from verl_ext.registry import INSTALLED

CORE = "verl.trainer.ppo.core_algos"


def install(core_algos: ModuleType) -> None:
    """Wrap the function by which verl's trainers find an estimator."""
    hooks.member(core_algos, "ADV_ESTIMATOR_REGISTRY")
    hooks.wrap(core_algos, "get_adv_estimator_fn", wrap_lookup)


def wrap_lookup(original: Callable[..., Any], name_or_enum: Any) -> Any:
    """`get_adv_estimator_fn(name_or_enum)`: return our function for a name of ours."""
    name = str(getattr(name_or_enum, "value", name_or_enum))
    return estimator_function(name) if is_ours(name) else original(name_or_enum)


def is_ours(name: str) -> bool:
    """Return whether verl in this process computes with this package by that name."""
    return name in INSTALLED and owner(name) is None


def owner(name: str) -> str | None:
    """Return the module that has registered a name; None without one.

    verl's own `gdpo` does not count, because it cannot run on verl's default trainer.
    """
    function = registered().get(name)
    module = getattr(function, "__module__", None) or "another package"
    return None if function is None or (name, module) == ("gdpo", CORE) else module


def registered() -> Mapping[str, Any]:
    """Return verl's estimators by name; none if this verl has no registry, for which the hook has an error."""
    return getattr(importlib.import_module(CORE), "ADV_ESTIMATOR_REGISTRY", {})


def estimator_function(name: str) -> Callable[..., Any]:
    """Return an estimator in verl's convention; it returns `(advantages, returns)`, the same tensor twice."""

    def compute_advantage(token_level_rewards: Any, response_mask: Any, **_other: Any) -> tuple[Any, Any]:
        advantages = compute(name, token_level_rewards, response_mask)
        return advantages, advantages

    compute_advantage.__name__ = compute_advantage.__qualname__ = f"compute_{name}_advantage"
    return compute_advantage


def compute(name: str, token_level_rewards: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Return the advantages `[B, L]` of the batch that a trainer is computing."""
    run, chain, rewards = _at_work(name)
    rows = rewards.rows
    if len(rows.owner) != len(response_mask):
        raise IntegrationError(
            f"{name} was called with {len(response_mask)} rows of a batch of {len(rows.owner)}: the trainer must pass "
            "all rows"
        )
    run.computed_at, run.called = run.step, True
    mask = float_mask(response_mask, token_level_rewards.dtype)  # becomes the result
    spans, owner = rewards.spans, rewards.owner
    tokens = rows.total(row_sums(mask)) if spans is None else spans.tokens(mask)
    rejected = np.bincount(owner, tokens) == 0
    part: Index | slice = slice(None)
    if run.settings.rewards.rejected == "leave_out" and rejected.any():
        part = np.flatnonzero(~rejected[owner])
    advantages = np.zeros(len(owner))
    if len(advantages[part]):
        total = rows.gather(scores(token_level_rewards, mask))  # with the KL term, if there is one
        if not run.settings.kl_in_reward:
            rewards = replace(rewards, score=total)
        batch = _batch(run, chain, rewards, total, tokens, part)
        advantages[part] = _run_chain(run, chain, batch)
        log_rewards(run, rewards, batch, np.unique(owner[part]))
    if len(rejected):
        run.metrics["advantage/rejected_responses"] = float(np.count_nonzero(rejected))
    if spans is None:
        return broadcast(rows.scatter(advantages), mask)
    values, counts = spans.span_values(advantages, mask.numel())
    return broadcast(values, mask, counts)


def _at_work(name: str) -> tuple[Run, Chain, Components]:
    """Return the run that computes a batch with this estimator, its steps, and the rewards of the batch."""
    run = CURRENT.get()
    if run is None or run.name != name or run.chain is None or run.rewards is None:
        hooks.require(*hooks.HOOKS)
        raise IntegrationError(
            f"the estimator {name!r} was called outside the advantage step of a trainer that verl_ext has checked: "
            "start a trainer of trainer.v1.trainer_mode, or RayPPOTrainer; in code of your own call "
            f"build({name!r}, settings)(Batch.of(...))"
        )
    return run, run.chain, run.rewards


def _run_chain(run: Run, chain: Chain, batch: Batch) -> Array:
    """Compute the advantages of a batch `[N]`; keep the new state, log, dump."""
    result = chain(batch, run.state)
    if run.state is None:
        plain_state(result.state)  # raise now, not at the first checkpoint
    run.state = result.state
    if run.settings.verl_ext.dump_dir is not None:
        dump.write(run, batch, result.advantages)
    run.metrics |= advantage_metrics(result.advantages)
    if run.needs.turns:
        run.metrics |= turn_metrics(batch)
    run.metrics |= {f"{metric_name(run.name)}/{short}": value for short, value in result.metrics.items()}
    return result.advantages


def _batch(run: Run, chain: Chain, rewards: Components, total: Array, tokens: Array, part: Index | slice) -> Batch:
    """Build the core's `Batch` of the rows `part`, which are trajectories or turns: rewards, accuracy, KL term.

    `total` `[N]` is the score with the KL term, if there is one; `tokens` `[M]` are those that count in the loss.
    """
    settings, score = run.settings.rewards, rewards.score
    keys, owner = settings.keys, rewards.owner[part]
    if score is None:
        raise DataError(
            "algorithm.use_kl_in_reward=True needs the scores before KL: pass them as batch['token_level_scores']"
        )
    matrix = score[:, None] if keys is None else np.stack([_column(run, rewards, key) for key in keys], axis=1)
    turns = None
    if rewards.spans is not None:
        by_turn = tuple(column for column, key in enumerate(keys or ()) if key in (settings.by_turn or ()))
        turns = Turns.of_counts(np.unique(owner, return_counts=True)[1], by_turn, settings.turn_discount)
    whole = turns is None and isinstance(part, slice)

    def selected(values: Any) -> Any:
        return values if whole else [values[trajectory] for trajectory in owner.tolist()]

    return Batch.of(
        matrix[part],
        selected(rewards.labels),
        prompts=rewards.groups if whole else None,
        turns=turns,
        keys=(SCORE,) if keys is None else keys,
        conditions=settings.conditions,
        lengths=tokens[part],
        accuracy=_accuracy(run, chain, rewards)[owner] if chain.needs_accuracy else None,
        kl_reward=(total - score)[owner] if run.settings.kl_in_reward else None,
        outputs=rewards.outputs[part],
        fields={name: selected(rewards.entries(name)) for name in chain.needs_fields},
    )


def _column(run: Run, rewards: Components, key: str) -> Array:
    """Return `[M]` the values of a reward; one of the response is repeated for each turn."""
    if key not in (run.settings.rewards.by_turn or ()):
        return rewards.column(key, "algorithm.rewards.keys")[rewards.owner]
    column, entries = rewards.entries_by_turn(key)
    missing = np.bincount(rewards.owner) - entries
    for name, count in {"cut": -missing, "missing": missing}.items():
        run.metrics[f"reward/{metric_name(key)}/{name}_entries"] = float(count.clip(0).sum())
    if not entries.any():
        run.warn_once(f"no entries: {key}", f"reward {key!r} (algorithm.rewards.by_turn) has no entry in a whole batch")
    return column


def _accuracy(run: Run, chain: Chain, rewards: Components) -> Array:
    """Return the accuracy of each trajectory; raise if the history is that of another accuracy."""
    settings = run.settings.rewards
    key, threshold = settings.accuracy_in(rewards), settings.accuracy_threshold
    now = {"key": key, "threshold": threshold}
    if chain.stateful:
        checkpoint.require_same_accuracy(run.accuracy, now)
    run.accuracy = now
    values = rewards.column(key, "algorithm.rewards.accuracy_key")
    return unit_accuracy(values, rewards.labels, key=key, threshold=threshold)


def log_and_dump(run: Run, rewards: Components, tensors: Callable[[], Mapping[str, torch.Tensor]] | None) -> None:
    """Log the named rewards of a run with an estimator of verl's own, and dump them with verl's advantages.

    Call it after the estimator. `tensors` returns `advantages`, `response_mask` and `token_level_scores`, each
    `[B, L]`; it is called only for a dump, and None if verl has drawn other rows for the update.
    """
    keys, rows = run.settings.rewards.keys, rewards.rows
    if not len(rewards.labels):
        return
    if keys is None:
        log_rewards(run, rewards)
        return
    batch = Batch.of(
        rewards.matrix(keys, counts=False),
        rewards.labels,
        prompts=rewards.groups,
        keys=keys,
        outputs=rows.outputs,
    )
    log_rewards(run, rewards, batch)
    if run.settings.verl_ext.dump_dir is not None and tensors is not None:
        given = tensors()
        mask = float_mask(given["response_mask"], torch.float32)
        tokens = row_sums(mask)
        # A critic's advantages differ from token to token: the mean over the tokens.
        sums = (given["advantages"].float() * mask).sum(dim=-1).double().cpu().numpy()
        advantages, total = rows.gather(divide(sums, tokens)), rows.gather(scores(given["token_level_scores"], mask))
        dump.write(run, replace(batch, lengths=rows.total(tokens)), advantages, total=total)


def log_rewards(run: Run, rewards: Components, batch: Batch | None = None, part: Index | None = None) -> None:
    """Add the metrics of the rewards in `batch`, and of the others if all are logged; of a part of the responses."""
    if run.log == "none":
        return
    returned = dict(rewards.numbers()) if run.log == "all" else {}
    keys = () if batch is None else batch.keys
    for name in set(rewards.returned) - returned.keys() - {*keys} if run.log == "all" else ():
        run.warn_once(f"no curve: {name}", f"the reward function's {name!r} has no curve: it is not always a number")
    others = tuple(key for key in returned if key not in keys)
    if batch is not None:
        run.metrics |= reward_metrics(batch)
    if others:
        responses = range(len(rewards.labels)) if part is None else part.tolist()
        matrix = np.stack([returned[key] for key in others], axis=1)[responses]
        run.metrics |= reward_metrics(Batch.of(matrix, [rewards.labels[row] for row in responses], keys=others))
