"""Metrics of each reward and of the advantages."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.groups import Array

Metrics = dict[str, float]

# verl aggregates a metric over the updates of one step by looking for these words anywhere in its name, so a reward
# called `format_minimal` would be logged by its minimum. A `_` after the word's first letter prevents that.
# The pattern matches only this letter, so that it finds words that overlap, as in `sumin`.
_MISREAD = re.compile("(?=max|min|mean|avg|average|sum|total|timing_s|timing_per_token).", re.IGNORECASE)


def metric_name(key: str) -> str:
    """Make the name of a reward safe for the name of a metric.

    >>> metric_name("format"), metric_name("format_minimal"), metric_name("a/b c")
    ('format', 'format_m_inimal', 'a_b_c')
    """
    plain = re.sub(r"[^0-9A-Za-z_.-]+", "_", key) or "_"
    if not plain.strip("."):  # `..` would be a folder for a logger that uses names as paths
        plain = "_" * len(plain)
    return _MISREAD.sub(r"\g<0>_", plain)


@functools.lru_cache(maxsize=64)
def metric_names(keys: tuple[str, ...]) -> Mapping[str, str]:
    """Metric names of several rewards; equal ones get a number.

    >>> metric_names(("a b", "a/b"))
    {'a b': 'a_b', 'a/b': 'a_b.2'}
    """
    names: dict[str, str] = {}
    for key in keys:
        plain = metric_name(key)
        candidates = (plain, *(f"{plain}.{number}" for number in range(2, len(keys) + 1)))
        names[key] = next(name for name in candidates if name not in names.values())
    return names


def reward_metrics(batch: Batch) -> Metrics:
    """Mean, std, min and max of each reward, the share of groups without variance, the number of unscored rows."""
    if not len(batch.rewards):
        return {}
    metrics: Metrics = {}
    dead = 1.0 - np.add.reduce(batch.variation[1]) / len(batch.groups)
    unscored = np.add.reduce(np.isnan(batch.rewards))
    for column, name in enumerate(metric_names(batch.keys).values()):
        values = batch.rewards[:, column]
        metrics |= _moments(f"reward/{name}", values[~np.isnan(values)] if unscored[column] else values)
        metrics[f"reward/{name}/dead_groups"] = float(dead[column])
        metrics[f"reward/{name}/unscored"] = float(unscored[column])
    return metrics


def advantage_metrics(advantages: Array) -> Metrics:
    """Mean, std, min and max over trajectories, and the share of exact zeros, which give no gradient."""
    if not len(advantages):
        return {}
    return _moments("advantage", advantages) | {
        "advantage/zero_share": 1.0 - float(np.count_nonzero(advantages)) / len(advantages)
    }


def _moments(name: str, values: Array) -> Metrics:
    if not len(values):
        return {}
    mean = mean_of(values)
    return {
        f"{name}/mean": mean,
        f"{name}/std": std_of(values, mean),
        f"{name}/min": float(np.minimum.reduce(values)),
        f"{name}/max": float(np.maximum.reduce(values)),
    }


def mean_of(values: Array) -> float:
    """The mean; faster than `values.mean()` on a few thousand values."""
    return float(np.add.reduce(values)) / len(values)


def std_of(values: Array, mean: float) -> float:
    """The population standard deviation around a known mean. `values.std()` would compute the mean again."""
    return math.sqrt(np.add.reduce(np.square(values - mean)) / len(values))
