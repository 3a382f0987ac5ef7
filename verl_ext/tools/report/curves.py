"""Turn logs into curves, into the numbers of the table, and into the choice of metrics for the plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from verl_ext.tools.report.logs import Log
from verl_ext.tools.tables import Table

if TYPE_CHECKING:
    import pandas as pd

Experiments = Mapping[str, Sequence[Log]]
"""The logs of the runs of each name: seeds of one experiment."""

NOISE = 1e-6
"""Relative differences up to this size are floating-point noise. Rewards are float32, with a precision of 1.2e-7."""
_EXT_SCORE, _VERL_SCORE = "reward/score/mean", "critic/score/mean"
"""The mean of the score as verl_ext logs it, and as verl logs it in every run."""
_ZERO_VARIANCE = "/zero_variance_group_fraction"
_CONTRIBUTION = "advantage/contribution/"
_FURTHER = {
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
    joined = pd.concat([log.table[metric].dropna() for log in logs], axis="columns", join="inner")
    joined.columns = range(len(logs))
    return None if joined.empty else joined


def logged(experiments: Experiments) -> list[str]:
    """Return the names of all metrics that any run has logged."""
    return sorted({str(name) for logs in experiments.values() for log in logs for name in log.table})


def rewards(experiments: Experiments) -> list[str]:
    """Return the mean of each named reward, and the mean of the score.

    The score is verl's own metric if a run lacks verl_ext's, or if no run has logged a named reward.
    """
    metrics, runs = logged(experiments), [log.table for logs in experiments.values() for log in logs]
    named = [name for name in metrics if name.startswith("reward/") and name.endswith("/mean") and name.count("/") == 2]
    if (named and _EXT_SCORE not in named) or all(_EXT_SCORE in run for run in runs):
        return named
    if all(_VERL_SCORE in run for run in runs):
        named = [name for name in named if name != _EXT_SCORE]
    return named + [name for name in (_VERL_SCORE,) if name in metrics]


def default_panels(experiments: Experiments) -> tuple[list[str], list[str]]:
    """Return the metrics of a plot for which the user names none, and those that are omitted because they never change.

    Candidates are the rewards, their fractions of zero-variance groups, their contributions and `_FURTHER`. If none of
    them changes, as in a run of one step, the rewards are drawn.
    """
    names, metrics = rewards(experiments), logged(experiments)
    contributions = (name for name in metrics if name.startswith(_CONTRIBUTION))
    further = [*(name.removesuffix("/mean") + _ZERO_VARIANCE for name in names), *contributions, *_FURTHER]
    candidates = names + [name for name in further if name in metrics]
    changing = [name for name in candidates if changes(experiments, name)]
    if not changing:
        return names, []
    return changing, [name for name in candidates if name not in changing]


def changes(experiments: Experiments, metric: str) -> bool:
    """Whether the values of a metric, over all steps and runs, differ by more than floating-point noise.

    Noise is at most `NOISE` times the scale of the metric. The scale is not always the size of the values: the mean of
    values around 1 that cancel is noise around 1e-16.
    """
    curves = (curve(logs, metric) for logs in experiments.values())
    values = [found for found in curves if found is not None]
    if not values:
        return False
    highest = max(float(found.to_numpy().max()) for found in values)
    lowest = min(float(found.to_numpy().min()) for found in values)
    return highest - lowest > NOISE * scale(experiments, metric)


def scale(experiments: Experiments, metric: str) -> float:
    """Return the size of the numbers from which a metric is computed.

    A fraction has scale 1. Otherwise it is the largest absolute value of the metric, and for a mean also of the
    minimum, the maximum and the standard deviation of the same quantity, if they are logged.
    """
    if unit(metric).startswith("fraction"):
        return 1.0
    names = [metric]
    if metric.endswith("/mean"):
        names += [f"{metric.removesuffix('mean')}{statistic}" for statistic in ("min", "max", "std")]
    tables = [log.table for logs in experiments.values() for log in logs]
    return max((float(table[name].abs().max()) for table in tables for name in names if name in table), default=0.0)


def title(metric: str) -> str:
    """Return a short title for a metric.

    >>> title("reward/format/mean"), title("reward/format/zero_variance_group_fraction"), title("actor/entropy")
    ('format', 'format: zero-variance groups', 'actor/entropy')
    """
    parts = metric.split("/")
    if metric.endswith(_ZERO_VARIANCE):
        return f"{'/'.join(parts[1:-1])}: zero-variance groups"
    return parts[1] if len(parts) == 3 and parts[0] == "reward" and parts[2] == "mean" else metric


def unit(metric: str) -> str:
    """Return what the values of a metric are."""
    if metric.endswith(_ZERO_VARIANCE):
        return "fraction of groups"
    if metric.startswith(_CONTRIBUTION):
        return "fraction of the advantage"
    return _FURTHER.get(metric, "reward, batch mean" if title(metric) != metric or metric == _VERL_SCORE else "value")


def window_of(experiments: Experiments, metrics: Sequence[str], asked: int) -> int:
    """Return the number of steps to average over: at most half of the shortest curve."""
    curves = [curve(logs, metric) for logs in experiments.values() for metric in metrics]
    return max(1, min([asked, *(len(values) // 2 for values in curves if values is not None)]))


def rows(experiments: Experiments, metrics: Sequence[str], window: int) -> Table:
    """Return a row for each metric and name, with ± the standard deviation over the runs.

    `first` and `final` are means over `window` steps, `highest` is the maximum of the moving average over `window`
    steps, and `mean` is the mean over all steps.
    """
    header = ("metric", "name", "runs", "steps", f"first {window}", f"final {window}", f"highest {window}", "mean")
    lines: Table = [header]
    for metric in metrics:
        for name, logs in experiments.items():
            values = curve(logs, metric)
            if values is None:
                lines.append((title(metric), name, str(len(logs)), "not logged", "", "", "", ""))
                continue
            highest = values.rolling(min(window, len(values))).mean().max()
            figures = (values.iloc[:window].mean(), values.iloc[-window:].mean(), highest, values.mean())
            steps = f"{values.index[0]}-{values.index[-1]}"
            lines.append((title(metric), name, str(len(logs)), steps, *map(_number, figures)))
    return lines


def _number(values: pd.Series[float]) -> str:
    """Return the mean over the runs, ± their standard deviation if there are several."""
    return " ± ".join(map(_text, (values.mean(), values.std())[: len(values)]))


def _text(value: float) -> str:
    """Return three decimals, or three significant digits of a small number such as a learning rate.

    >>> _text(1.25), _text(0.0), _text(1e-6)
    ('1.250', '0.000', '1e-06')
    """
    return f"{value:.3g}" if 0 < abs(value) < 0.01 else f"{value:.3f}"
