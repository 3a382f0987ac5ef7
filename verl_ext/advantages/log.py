"""The metrics and warnings about the rewards and advantages of a batch."""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from verl_ext.advantages import dump
from verl_ext.advantages.table import ALL, Table, is_number
from verl_ext.core.batch import SCORE, Batch
from verl_ext.core.chain import Result
from verl_ext.core.groups import Array, Index, divide
from verl_ext.core.metrics import advantage_metrics, contribution_metrics, metric_name, reward_metrics, turn_metrics
from verl_ext.errors import listed
from verl_ext.run import Run

ZERO_BATCHES = 5
"""The number of consecutive batches without an advantage after which a run is warned."""


def log_advantages(run: Run, batch: Batch, result: Result) -> None:
    """Add the metrics of the advantages and of the steps of the estimator."""
    run.metrics |= advantage_metrics(result.advantages)
    _watch_zero_advantages(run, batch, result.advantages)
    if result.contributions is not None and result.total is not None:
        has_rest = batch.kl_reward is not None
        run.metrics |= contribution_metrics(
            batch.reward_names, batch.groups, result.contributions, result.total, result.advantages, rest=has_rest
        )
    if run.settings.rewards.per_turn:
        run.metrics |= turn_metrics(batch)
    for name, value in result.metrics.items():
        run.metrics[f"{metric_name(run.name)}/{name}"] = value


def _watch_zero_advantages(run: Run, batch: Batch, advantages: Array) -> None:
    """Log a warning if every advantage has been 0 for several batches, because such a run does not learn."""
    run.zero_batches = 0 if advantages.any() else run.zero_batches + 1
    if run.zero_batches < ZERO_BATCHES:
        return
    by_reward = batch.by_reward()
    varies = by_reward.groups.varies(by_reward.returns)  # [G, rewards]
    varies_in_any_group = np.any(varies, axis=0).tolist()
    constant = [key for key, varying in zip(by_reward.keys, varies_in_any_group, strict=True) if not varying]
    reason = f"The rewards {listed(constant)} do not vary in any group." if constant else "The rewards cancel."
    run.warn_once(
        "zero advantages",
        f"Every advantage has been 0 in the last {run.zero_batches} batches, up to step {run.step}, so the model does "
        f"not learn. {reason} Check the curves reward/<key>/mean, the difficulty of the prompts and the sampling "
        "temperature.",
    )


def log_rewards(run: Run, table: Table, batch: Batch | None = None, included: Index | slice = ALL) -> None:
    """Add the metrics of the rewards in `batch` and, if all rewards are logged, of the other rewards.

    `included` selects the trajectories for the metrics of the other rewards.
    """
    if table.entries:
        _log_entries_per_turn(run, table)
    if run.logged_rewards == "none":
        return
    logged: tuple[str, ...] = ()
    if batch is not None:
        run.metrics |= reward_metrics(batch)
        logged = batch.reward_of_column
    if run.logged_rewards == "all":
        _log_other_rewards(run, table, logged, included)


def _log_entries_per_turn(run: Run, table: Table) -> None:
    """Count the entries per turn that are missing or have no turn, and warn if a reward has no entry at all."""
    for key, entries in table.entries.items():
        turns = np.bincount(table.trajectory_of_segment)  # [T]
        missing_entries = (turns - entries).clip(0)
        truncated_entries = (entries - turns).clip(0)
        name = metric_name(key)
        run.metrics[f"reward/{name}/truncated_entries"] = float(truncated_entries.sum())
        run.metrics[f"reward/{name}/missing_entries"] = float(missing_entries.sum())
        if not entries.any():
            run.warn_once(
                f"no entries: {key}",
                f"The reward {key!r} has no entry for any turn of a whole batch. Return one number per turn, or "
                "remove it from algorithm.rewards.per_turn.",
            )


def _log_other_rewards(run: Run, table: Table, logged: tuple[str, ...], included: Index | slice) -> None:
    """Add the metrics of what the reward function returned, except for the rewards that are `logged` already."""
    results = table.results or {}
    per_response = table.per_response()
    if SCORE in results and SCORE not in logged:
        run.metrics |= reward_metrics(per_response.batch(None, included, for_estimator=False))
    names = []
    for name, values in results.items():
        if name in (*logged, SCORE):
            continue
        is_numeric = all(value is None or is_number(value) for value in values)
        if isinstance(name, str) and is_numeric:
            names.append(name)
        else:
            text = f"The component {name!r} of the reward function has no metrics, because it is not always a number."
            run.warn_once(f"no curve: {name}", text)
    if names:
        run.metrics |= reward_metrics(per_response.batch(names, included, for_estimator=False))


def record_step_of_verl_estimator(
    run: Run, table: Table, tensors: Callable[[], Mapping[str, torch.Tensor]] | None = None
) -> None:
    """Record a step of a run whose advantages verl has computed: the metrics of its rewards, and a dump.

    `tensors` returns `advantages`, `response_mask` and `token_level_scores`, each `[B, L]`. It is called only for a
    dump. `tensors` is None if verl has resampled the rows for the update.
    """
    keys = run.settings.rewards.keys
    if not len(table.labels):
        return
    if keys is None:
        log_rewards(run, table)
        return
    batch = table.batch(keys, for_estimator=False)
    log_rewards(run, table, batch)
    has_contributions = run.name == "grpo" and run.logged_rewards != "none" and not run.settings.kl_in_reward
    if table.score is not None and has_contributions:
        advantages = _grpo(run, batch, table.score)
        rewards = np.nan_to_num(batch.returns)
        run.metrics |= contribution_metrics(
            batch.reward_names, batch.groups, rewards, table.score, advantages, rest=True
        )
    if run.settings.verl_ext.dump_dir is not None and tensors is not None:
        dump.write_of_verl_estimator(run, table, batch, tensors())


def _grpo(run: Run, batch: Batch, score: Array) -> Array:
    """Return verl's grpo advantages `[T]` of the scores, without the 1e-6 that verl adds to the standard deviation."""
    groups = batch.groups
    centered = score - groups.broadcast(groups.mean(score))
    if not run.settings.norm_by_std:
        return centered
    return divide(centered, groups.broadcast(groups.std(centered)))
