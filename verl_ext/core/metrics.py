"""Metrics of each reward and of the advantages."""

import re
from collections.abc import Sequence

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.groups import Array, Groups, divide

Metrics = dict[str, float]

TURNS = 8
"""Number of turns, from the first, with separate metrics of per-turn rewards."""

# verl derives the aggregation of a metric over the updates of one step from these words anywhere in its name, and from
# `lr` at its end. A reward called `format_minimal` would be logged as a minimum, so its first letter is escaped.
_MISREAD = r"(?=max|min|mean|avg|average|sum|total|timing_s|timing_per_token|lr\Z)."
# Loggers change other characters, and a name of dots would be a folder. The last alternative keeps codes unique.
_CODED = re.compile(rf"[^\w.-]|{_MISREAD}|\A\.(?=\.*\Z)|_(?=x[0-9a-f])", re.IGNORECASE)


def metric_name(key: str) -> str:
    """Escape the name of a reward for use in the name of a metric. Different rewards get different names.

    >>> metric_name("format"), metric_name("正确"), metric_name("a/b c"), metric_name("minimal")
    ('format', '正确', 'a_x2f_b_x20_c', '_x6d_inimal')
    """
    return _CODED.sub(lambda match: f"_x{ord(match[0]):x}_", key) or "_x_"


def reward_metrics(batch: Batch) -> Metrics:
    """Statistics of each reward as the estimator saw it: after the conditions, before the weights.

    `zero_variance_group_fraction` is the fraction of zero-variance groups. With conditions, `raw_mean` is the mean
    before them, and `condition_met_fraction` is the fraction of responses that meet the condition, among those for
    which this is known. A per-turn reward contributes the whole return of a response; `per_turn/<t>/mean` is the mean
    reward of turn `t`. A rubric contributes the weighted sum of its criteria. `criteria` is the mean number of criteria
    with a nonzero weight per prompt, and `varying_criteria_fraction` the fraction of them that vary in their group.
    """
    if not len(batch.returns):
        return {}
    metrics: Metrics = {}
    if batch.factors is not None:
        varies, counts = batch.groups.varies(batch.returns), batch.factors[batch.groups.order[batch.groups.starts]] != 0
        rubrics = np.array(batch.keys) != batch.column_keys
        for key in dict.fromkeys(np.array(batch.column_keys)[rubrics].tolist()):
            name, counted = f"reward/{metric_name(key)}", counts & (np.array(batch.column_keys) == key)
            metrics[f"{name}/criteria"] = float(counted.sum(axis=1).mean())
            metrics[f"{name}/varying_criteria_fraction"] = float(varies[counted].mean())
    batch = batch.by_key()
    seen = batch.returns
    dead = 1.0 - batch.groups.varies(seen).mean(axis=0)
    turns = batch.turns
    raw = turns.returns(batch.raw) if batch.conditions else np.empty_like(seen)
    for column, key in enumerate(batch.keys):
        name, per_turn = f"reward/{metric_name(key)}", column in turns.columns
        once = turns.number == 0 if per_turn else turns.last
        scored = _scored(seen[once, column])
        metrics |= _moments(name, scored)
        metrics[f"{name}/zero_variance_group_fraction"] = float(dead[column])
        metrics[f"{name}/unscored"] = float(once.sum() - len(scored))
        if batch.conditions and len(before := _scored(raw[once, column])):
            metrics[f"{name}/raw_mean"] = float(before.mean())
        needed = batch.conditions.get(key)
        if needed and len(met := _scored(needed.met(batch.raw[turns.last, batch.keys.index(needed.reward)]))):
            metrics[f"{name}/condition_met_fraction"] = float(met.mean())
        for turn in range(TURNS * per_turn):
            given = _scored(batch.raw[turns.number == turn, column])
            if len(given):
                metrics[f"{name}/per_turn/{turn + 1}/mean"] = float(given.mean())
    return metrics


def turn_metrics(batch: Batch) -> Metrics:
    """Return the mean number of turns, and the fraction of turns that no other response to the prompt has reached.

    >>> from verl_ext.core.turns import Turns
    >>> batch = Batch.of([[1.0]] * 3, ["a"] * 3, turns=Turns.of_counts([2, 1]))
    >>> turn_metrics(batch)
    {'advantage/turns': 1.5, 'advantage/single_turn_fraction': 0.3333333333333333}
    """
    single = batch.groups.sizes == 1
    return {
        "advantage/turns": float(1 / batch.turns.last.mean()),
        "advantage/single_turn_fraction": float(batch.groups.broadcast(single).mean()),
    }


def advantage_metrics(advantages: Array) -> Metrics:
    """Return mean, std, min and max over trajectories, and the fraction of exact zeros, which give no gradient."""
    if not len(advantages):
        return {}
    return _moments("advantage", advantages) | {"advantage/zero_fraction": float((advantages == 0).mean())}


def reward_shares(groups: Groups, parts: Array, total: Array, advantages: Array) -> Array:
    """Return `[K]` each reward's contribution to the advantages: the mean of `cov(c_k, S) / var(S)` over groups.

    `S` is `total`, the sum of the rewards, and `c_k` is a column of `parts`, the contribution of a reward to the sum.
    Each group is weighted by the sum of its squared advantages. A contribution is below 0 or above 1 if rewards oppose
    each other. The difference to 1 comes from other terms than the rewards in `parts`. The result is NaN if no group
    has both nonzero advantages and an `S` with nonzero variance.

    >>> parts = np.array([[3.0, 0.0], [-3.0, 1.0]])
    >>> reward_shares(Groups.of("gg"), parts, parts.sum(axis=1), np.array([1.0, -1.0]))
    array([ 1.2, -0.2])
    """
    mean, varies = groups.variation(total)
    weights = np.where(varies, groups.sum(np.square(advantages)), 0.0)
    if not weights.any():
        return np.full(parts.shape[1], np.nan)
    deviations = np.nan_to_num(total - groups.broadcast(mean))
    centered = parts - groups.broadcast(groups.mean(parts))  # so that a large offset leaves no rounding
    covariance, variance = groups.sum(centered * deviations[:, None]), groups.sum(np.square(deviations))
    shares: Array = weights @ divide(covariance, variance[:, None]) / weights.sum()
    return shares


def share_metrics(
    keys: Sequence[str], groups: Groups, parts: Array, total: Array, advantages: Array, *, rest: bool
) -> Metrics:
    """Return the contributions of `reward_shares` by reward, and with `rest` the difference of their sum to 1.

    A single reward without a rest is not reported, because its contribution is always 1.
    """
    shares = reward_shares(groups, parts, total, advantages)
    if np.isnan(shares).any() or (len(keys) == 1 and not rest):
        return {}
    metrics = {"advantage/contribution/rest": 1 - float(shares.sum())} if rest else {}
    named = zip(keys, shares, strict=True)
    return metrics | {f"advantage/contribution/{metric_name(key)}": float(share) for key, share in named}


def _scored(values: Array) -> Array:
    return values[~np.isnan(values)]


def _moments(name: str, values: Array) -> Metrics:
    if not len(values):
        return {}
    statistics = {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
    return {f"{name}/{key}": float(value) for key, value in statistics.items()}
