"""From logs to curves, to the figures of the table, and to the metrics of the picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from verl_ext.tools.report.logs import Log
from verl_ext.tools.tables import Table

if TYPE_CHECKING:
    import pandas as pd

Experiments = Mapping[str, Sequence[Log]]
"""The logs of the runs of each name: seeds of one experiment."""

_OURS, _SCORE = "reward/score/mean", "critic/score/mean"
"""The mean of the score, and verl's own, which a run without this package has."""
_DEAD = "/zero_variance_group_fraction"
_SHARE = "advantage/contribution/"
_BESIDE = {
    "advantage/std": "std over responses",
    "advantage/zero_fraction": "share of responses",
    "response_length/mean": "tokens, batch mean",
}
"""What a picture shows beside the rewards, with its unit."""


def curve(logs: Sequence[Log], metric: str) -> pd.DataFrame | None:
    """Return a column for each run, at the steps at which all of them logged the metric; None if there is no such step.

    A step at which a run logged NaN does not count as logged.
    """
    import pandas as pd

    if not all(metric in log.table for log in logs):
        return None
    joined = pd.concat([log.table[metric].dropna() for log in logs], axis="columns", join="inner")
    joined.columns = range(len(logs))
    return None if joined.empty else joined


def constant(experiments: Experiments, metric: str) -> str | None:
    """Return the value of a metric that is the same at each step of all runs, as rounded: shares to 0.001."""
    rounded = "{:.3f}".format if unit(metric).startswith("share") else _text
    curves = (curve(logs, metric) for logs in experiments.values())
    values = {rounded(value) for found in curves if found is not None for value in found.to_numpy().flat}
    return values.pop() if len(values) == 1 else None


def logged(experiments: Experiments) -> list[str]:
    """Return the names of all metrics that any run has logged."""
    return sorted({str(name) for logs in experiments.values() for log in logs for name in log.table})


def rewards(experiments: Experiments) -> list[str]:
    """Return the mean of each named reward; of the score verl's own if a run lacks ours, or has no named reward."""
    metrics, runs = logged(experiments), [log.table for logs in experiments.values() for log in logs]
    named = [name for name in metrics if name.startswith("reward/") and name.endswith("/mean") and name.count("/") == 2]
    if (named and _OURS not in named) or all(_OURS in run for run in runs):
        return named
    if all(_SCORE in run for run in runs):
        named = [name for name in named if name != _OURS]
    return named + [name for name in (_SCORE,) if name in metrics]


def pictured(experiments: Experiments) -> list[str]:
    """Return the metrics of the picture: the rewards, and what was logged of dead groups, shares and `_BESIDE`."""
    names, metrics = rewards(experiments), logged(experiments)
    shares = (name for name in metrics if name.startswith(_SHARE))
    beside = [*(name.removesuffix("/mean") + _DEAD for name in names), *shares, *_BESIDE]
    return names + [name for name in beside if name in metrics]


def title(metric: str) -> str:
    """Return a short title for a metric.

    >>> title("reward/format/mean"), title("reward/format/zero_variance_group_fraction"), title("actor/entropy")
    ('format', 'format: dead groups', 'actor/entropy')
    """
    parts = metric.split("/")
    if metric.endswith(_DEAD):
        return f"{'/'.join(parts[1:-1])}: dead groups"
    return parts[1] if len(parts) == 3 and parts[0] == "reward" and parts[2] == "mean" else metric


def unit(metric: str) -> str:
    """Return what the values of a metric are."""
    if metric.endswith(_DEAD):
        return "share of prompts"
    if metric.startswith(_SHARE):
        return "share of the advantage"
    return _BESIDE.get(metric, "reward, batch mean" if title(metric) != metric or metric == _SCORE else "value")


def width_of(experiments: Experiments, metrics: Sequence[str], asked: int) -> int:
    """Return the number of steps in `first` and `final`: at most half of the shortest curve, so that they are apart."""
    curves = [curve(logs, metric) for logs in experiments.values() for metric in metrics]
    return max(1, min([asked, *(len(values) // 2 for values in curves if values is not None)]))


def rows(experiments: Experiments, metrics: Sequence[str], width: int) -> Table:
    """Return a line for each metric and name, ± standard deviation over the runs.

    `first` and `final` are means over `width` steps, `highest` is the highest mean over `width` consecutive steps (the
    worst, for seconds or dead groups), and `mean` is that over all steps.
    """
    lines: Table = [("metric", "name", "runs", "steps", f"first {width}", f"final {width}", f"highest {width}", "mean")]
    for metric in metrics:
        for name, logs in experiments.items():
            values = curve(logs, metric)
            if values is None:
                lines.append((title(metric), name, str(len(logs)), "not logged", "", "", "", ""))
                continue
            highest = values.rolling(min(width, len(values))).mean().max()
            figures = (values.iloc[:width].mean(), values.iloc[-width:].mean(), highest, values.mean())
            steps = f"{values.index[0]}-{values.index[-1]}"
            lines.append((title(metric), name, str(len(logs)), steps, *map(_number, figures)))
    return lines


def _number(values: pd.Series[float]) -> str:
    """Return the mean over the runs, ± their standard deviation if there are several."""
    return " ± ".join(map(_text, (values.mean(), values.std())[: len(values)]))


def _text(value: float) -> str:
    """Return three decimals, or three figures of what is smaller, such as a learning rate.

    >>> _text(1.25), _text(0.0), _text(1e-6)
    ('1.250', '0.000', '1e-06')
    """
    return f"{value:.3g}" if 0 < abs(value) < 0.01 else f"{value:.3f}"
