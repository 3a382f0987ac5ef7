"""Turn logs into curves, and choose the metrics of the table and of the plot."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from verl_ext.tools.report.logs import Log

if TYPE_CHECKING:
    import pandas as pd

Experiments = Mapping[str, Sequence[Log]]
"""The logs of the runs of each name: seeds of one experiment."""

NOISE = 1e-6
"""Relative differences up to this size are floating-point noise. Rewards are float32, with a precision of 1.2e-7."""
_EXT_SCORE = "reward/score/mean"
"""The mean of the score as verl_ext logs it."""
_VERL_SCORE = "critic/score/mean"
"""The mean of the score as verl logs it in every run."""
_REWARD_MEAN = re.compile(r"reward/([^/]*)/mean")
_ZERO_VARIANCE = "/zero_variance_group_fraction"
_CONTRIBUTION = "advantage/contribution/"
_FURTHER_UNITS = {
    "advantage/std": "standard deviation over responses",
    "advantage/zero_fraction": "fraction of responses",
    "response_length/mean": "tokens, batch mean",
}
"""Further metrics of a plot, with their units."""


def curve(logs: Sequence[Log], metric: str) -> pd.DataFrame | None:
    """Return a column for each run, at the steps at which all of them logged the metric; None if there is no such step.

    A step at which a run logged NaN does not count as logged.
    """
    import pandas as pd

    if not all(metric in log.table for log in logs):
        return None
    values_of_runs = [log.table[metric].dropna() for log in logs]
    values = pd.concat(values_of_runs, axis="columns", join="inner")
    values.columns = range(len(logs))
    return None if values.empty else values


def tables(experiments: Experiments) -> list[pd.DataFrame]:
    """Return the metrics of each run of all experiments."""
    return [log.table for logs in experiments.values() for log in logs]


def logged(experiments: Experiments) -> list[str]:
    """Return the names of all metrics that any run has logged."""
    names = {str(name) for table in tables(experiments) for name in table}
    return sorted(names)


def rewards(experiments: Experiments) -> list[str]:
    """Return the mean of each named reward, and the mean of the score.

    The score is verl's own metric if a run lacks verl_ext's, or if no run has logged a named reward.
    """
    runs = tables(experiments)
    metrics = logged(experiments)
    means = [metric for metric in metrics if _REWARD_MEAN.fullmatch(metric)]
    score_is_not_a_reward = bool(means) and _EXT_SCORE not in means
    if score_is_not_a_reward or all(_EXT_SCORE in run for run in runs):
        return means
    if all(_VERL_SCORE in run for run in runs) and _EXT_SCORE in means:
        means.remove(_EXT_SCORE)
    if _VERL_SCORE in metrics:
        means.append(_VERL_SCORE)
    return means


def default_panels(experiments: Experiments) -> tuple[list[str], list[str]]:
    """Return the metrics of a plot for which the user names none, and those that are omitted because they never change.

    Candidates are the rewards, their fractions of zero-variance groups, their contributions and `_FURTHER_UNITS`. If
    none of them changes, as in a run of one step, the rewards are drawn.
    """
    means = rewards(experiments)
    metrics = logged(experiments)
    further = [f"{mean.removesuffix('/mean')}{_ZERO_VARIANCE}" for mean in means]
    further += [metric for metric in metrics if metric.startswith(_CONTRIBUTION)]
    further += list(_FURTHER_UNITS)
    candidates = means + [metric for metric in further if metric in metrics]
    changing = [metric for metric in candidates if changes(experiments, metric)]
    if not changing:
        return means, []
    constant = [metric for metric in candidates if metric not in changing]
    return changing, constant


def changes(experiments: Experiments, metric: str) -> bool:
    """Whether the values of a metric, over all steps and runs, differ by more than floating-point noise.

    Noise is at most `NOISE` times the scale of the metric. The scale is not always the size of the values: the mean of
    values around 1 that cancel is noise around 1e-16.
    """
    curves = [curve(logs, metric) for logs in experiments.values()]
    arrays = [values.to_numpy() for values in curves if values is not None]
    if not arrays:
        return False
    highest = max(float(array.max()) for array in arrays)
    lowest = min(float(array.min()) for array in arrays)
    return highest - lowest > NOISE * scale(experiments, metric)


def scale(experiments: Experiments, metric: str) -> float:
    """Return the size of the numbers from which a metric is computed.

    A fraction has scale 1. Otherwise it is the largest absolute value of the metric, and for a mean also of the
    minimum, the maximum and the standard deviation of the same quantity, if they are logged.
    """
    if unit(metric).startswith("fraction"):
        return 1.0
    related = [metric]
    if metric.endswith("/mean"):
        quantity = metric.removesuffix("/mean")
        related += [f"{quantity}/min", f"{quantity}/max", f"{quantity}/std"]
    largest = 0.0
    for table in tables(experiments):
        for name in related:
            if name in table:
                largest = max(largest, float(table[name].abs().max()))
    return largest


def title(metric: str) -> str:
    """Return a short title for a metric.

    >>> title("reward/format/mean"), title("reward/format/zero_variance_group_fraction"), title("actor/entropy")
    ('format', 'format: zero-variance groups', 'actor/entropy')
    """
    if metric.endswith(_ZERO_VARIANCE):
        _, _, reward = metric.removesuffix(_ZERO_VARIANCE).partition("/")
        return f"{reward}: zero-variance groups"
    reward_mean = _REWARD_MEAN.fullmatch(metric)
    return reward_mean[1] if reward_mean else metric


def unit(metric: str) -> str:
    """Return what the values of a metric are."""
    if metric.endswith(_ZERO_VARIANCE):
        return "fraction of groups"
    if metric.startswith(_CONTRIBUTION):
        return "fraction of the advantage"
    if metric == _VERL_SCORE or _REWARD_MEAN.fullmatch(metric):
        return "reward, batch mean"
    return _FURTHER_UNITS.get(metric, "value")


def window_of(experiments: Experiments, metrics: Sequence[str], largest: int) -> int:
    """Return the number of steps to average over: `largest`, but at most half of the shortest curve."""
    window = largest
    for logs in experiments.values():
        for metric in metrics:
            values = curve(logs, metric)
            if values is not None:
                window = min(window, len(values) // 2)
    return max(1, window)
