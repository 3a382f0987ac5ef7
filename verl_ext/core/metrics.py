"""Metrics of each reward and of the advantages."""

import re
from collections.abc import Sequence

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.groups import Array, Groups, divide

Metrics = dict[str, float]

TURNS = 8
"""Number of turns, from the first, with separate metrics of per-turn rewards."""


def reward_metrics(batch: Batch) -> Metrics:
    """Return statistics of each reward as the estimator received it: after the conditions, before the weights.

    `zero_variance_group_fraction` is the fraction of zero-variance groups. With conditions, `raw_mean` is the mean
    before them, and `condition_met_fraction` is the fraction of responses that meet the condition, among those for
    which this is known. A per-turn reward contributes the whole return of a response; `per_turn/<t>/mean` is the mean
    reward of turn `t`. A rubric contributes the weighted sum of its criteria. `criteria` is the mean number of criteria
    with a nonzero weight per prompt, and `varying_criteria_fraction` the fraction of them that vary in their group.
    """
    if not len(batch.returns):
        return {}
    metrics: Metrics = {}
    if batch.criterion_weights is not None:
        metrics |= _rubric_metrics(batch, batch.criterion_weights)
        batch = batch.by_reward()
    # From here on each column is a reward.
    zero_variance_fractions = 1.0 - batch.groups.varies(batch.returns).mean(axis=0)  # [K]
    rewards = batch.trajectory_rewards()  # [T, K]
    raw_rewards = batch.trajectory_rewards(raw=True) if batch.conditions else rewards
    for column, key in enumerate(batch.keys):
        name = f"reward/{metric_name(key)}"
        is_scored = ~np.isnan(rewards[:, column])
        scored = rewards[is_scored, column]
        metrics |= _moments(name, scored)
        metrics[f"{name}/zero_variance_group_fraction"] = float(zero_variance_fractions[column])
        metrics[f"{name}/unscored"] = float(len(rewards) - len(scored))
        if batch.conditions:
            metrics |= _mean(f"{name}/raw_mean", raw_rewards[:, column])
        if key in batch.conditions:
            metrics |= _mean(f"{name}/condition_met_fraction", _condition_met(batch, key))
        if column in batch.turns.columns:
            metrics |= _per_turn_metrics(name, batch, column)
    return metrics


def _rubric_metrics(batch: Batch, criterion_weights: Array) -> Metrics:
    """Return the number of criteria of each rubric, and the fraction of them that vary in their group."""
    metrics: Metrics = {}
    varies = batch.groups.varies(batch.returns)  # [G, K]
    first_segment_of_group = batch.groups.order[batch.groups.starts]  # [G]
    has_weight = criterion_weights[first_segment_of_group] != 0  # [G, K]: the weights are equal within a group
    reward_of_column = np.array(batch.reward_of_column)
    is_criterion = reward_of_column != np.array(batch.keys)  # the column of a plain reward is named after the reward
    for key in dict.fromkeys(reward_of_column[is_criterion].tolist()):
        criteria = has_weight & (reward_of_column == key)  # [G, K]
        name = f"reward/{metric_name(key)}"
        metrics[f"{name}/criteria"] = float(criteria.sum(axis=1).mean())
        metrics[f"{name}/varying_criteria_fraction"] = float(varies[criteria].mean())
    return metrics


def _condition_met(batch: Batch, key: str) -> Array:
    """Return `[T]` whether each trajectory meets the condition on a reward: 1, 0, or NaN where this is not known."""
    condition = batch.conditions[key]
    required = batch.keys.index(condition.reward)
    return condition.met(batch.raw[batch.turns.last, required])


def _per_turn_metrics(name: str, batch: Batch, column: int) -> Metrics:
    """Return the mean of a per-turn reward at each of the first turns."""
    metrics: Metrics = {}
    for turn in range(TURNS):
        rewards = batch.raw[batch.turns.number == turn, column]
        metrics |= _mean(f"{name}/per_turn/{turn + 1}/mean", rewards)
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
    """Return mean, std, min and max over segments, and the fraction of exact zeros, which give no gradient."""
    if not len(advantages):
        return {}
    return _moments("advantage", advantages) | {"advantage/zero_fraction": float((advantages == 0).mean())}


def reward_contributions(groups: Groups, terms: Array, total: Array, advantages: Array) -> Array:
    """Return `[K]` each reward's contribution to the advantages: the mean of `cov(c_k, S) / var(S)` over groups.

    `S` is `total`, the sum of the rewards, and `c_k` is a column of `terms`, the term of a reward in the sum.
    Each group is weighted by the sum of its squared advantages. A contribution is below 0 or above 1 if rewards oppose
    each other. The difference to 1 comes from other terms than the rewards in `terms`. The result is NaN if no group
    has both nonzero advantages and an `S` with nonzero variance.

    >>> terms = np.array([[3.0, 0.0], [-3.0, 1.0]])
    >>> reward_contributions(Groups.of("gg"), terms, terms.sum(axis=1), np.array([1.0, -1.0]))
    array([ 1.2, -0.2])
    """
    mean, varies = groups.variation(total)
    group_weights = np.where(varies, groups.sum(np.square(advantages)), 0.0)
    if not group_weights.any():
        return np.full(terms.shape[1], np.nan)
    deviations = np.nan_to_num(total - groups.broadcast(mean))
    centered = terms - groups.broadcast(groups.mean(terms))  # so that a large offset leaves no rounding
    covariance = groups.sum(centered * deviations[:, None])  # [G, K]
    variance = groups.sum(np.square(deviations))  # [G]
    contributions = divide(covariance, variance[:, None])
    weighted_mean: Array = group_weights @ contributions / group_weights.sum()
    return weighted_mean


def contribution_metrics(
    keys: Sequence[str], groups: Groups, terms: Array, total: Array, advantages: Array, *, rest: bool
) -> Metrics:
    """Return the contributions of `reward_contributions` by reward, and with `rest` the difference of their sum to 1.

    A single reward without a rest is not reported, because its contribution is always 1.
    """
    contributions = reward_contributions(groups, terms, total, advantages)
    if np.isnan(contributions).any() or (len(keys) == 1 and not rest):
        return {}
    metrics: Metrics = {}
    if rest:
        metrics["advantage/contribution/rest"] = 1 - float(contributions.sum())
    for key, contribution in zip(keys, contributions.tolist(), strict=True):
        metrics[f"advantage/contribution/{metric_name(key)}"] = contribution
    return metrics


def _mean(name: str, values: Array) -> Metrics:
    """Return the mean of the scored values, or no metric if no value is scored."""
    scored = values[~np.isnan(values)]
    return {name: float(scored.mean())} if len(scored) else {}


def _moments(name: str, values: Array) -> Metrics:
    if not len(values):
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/std": float(values.std()),
        f"{name}/min": float(values.min()),
        f"{name}/max": float(values.max()),
    }


# Names of metrics: the name of a reward may contain characters that verl or a logger would misread.

# The characters that `metric_name` escapes. Each pattern matches one character. A lookahead `(?=...)` only looks at the
# text that begins with this character, so that words that overlap are all found: both of "sumin" are escaped.

# verl aggregates a metric over the updates of one step as these words in its name say. It would log the mean of a
# reward called "minimal" as a minimum, so "minimal" becomes "_x6d_inimal".
_FIRST_LETTER_OF_AGGREGATION = r"(?=max|min|mean|avg|average|sum|total|timing_s|timing_per_token)."
# verl logs the last value instead of the mean if a name ends in "lr" (learning rate): "lr" becomes "_x6c_r".
_FIRST_LETTER_OF_FINAL_LR = r"(?=lr\Z)."
# Loggers replace any other character than these: "b c" becomes "b_x20_c".
_CHANGED_BY_LOGGERS = r"[^\w.-]"
# Loggers would make a name of dots a folder: ".." becomes "_x2e_.".
_FIRST_OF_ONLY_DOTS = r"\A\.(?=\.*\Z)"
# A reward can have a name that looks escaped, and must not share it with another: "b_x20_c" becomes "b_x5f_x20_c".
_UNDERSCORE_OF_AN_ESCAPE = r"_(?=x[0-9a-f])"
_ESCAPED = re.compile(
    "|".join(
        (
            _FIRST_LETTER_OF_AGGREGATION,
            _FIRST_LETTER_OF_FINAL_LR,
            _CHANGED_BY_LOGGERS,
            _FIRST_OF_ONLY_DOTS,
            _UNDERSCORE_OF_AN_ESCAPE,
        )
    ),
    re.IGNORECASE,
)


def metric_name(key: str) -> str:
    """Escape the name of a reward for use in the name of a metric. Different rewards get different names.

    An escaped character is written as `_x<code>_`, where the code is its Unicode number in hexadecimal digits. An empty
    name becomes `_x_`.

    >>> metric_name("format"), metric_name("正确"), metric_name("a/b c"), metric_name("minimal")
    ('format', '正确', 'a_x2f_b_x20_c', '_x6d_inimal')
    >>> metric_name("lr"), metric_name(".."), metric_name("b c"), metric_name("b_x20_c"), metric_name("sumin")
    ('_x6c_r', '_x2e_.', 'b_x20_c', 'b_x5f_x20_c', '_x73_u_x6d_in')
    """
    return _ESCAPED.sub(_escape, key) or "_x_"


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"_x{code:x}_"
