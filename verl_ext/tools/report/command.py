"""Print a table and draw a plot of the rewards of runs, from the logs of verl's file logger."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext.errors import ConfigurationError, DataError, listed, unknown
from verl_ext.files import METRICS, Table, aligned, say
from verl_ext.tools.report.curves import Experiments, curve, default_panels, logged, rewards, title, window_of
from verl_ext.tools.report.logs import Log, find_log, read_log
from verl_ext.tools.report.plot import plot, save

if TYPE_CHECKING:
    import pandas as pd


def report(options: argparse.Namespace) -> int:
    """Print the table, and write the plot if asked to."""
    experiments = _read(options.runs)
    metrics = _metrics_of_table(experiments, options.metrics)
    window = window_of(experiments, metrics, options.window)
    lines = [aligned(_table(experiments, metrics, window)), *_remarks(experiments, window)]
    notes = list(_notes(experiments, metrics))
    if window < options.window:
        notes.append(
            f"The window is {_steps(window)} instead of {options.window}, because it can be at most half of the "
            "shortest run."
        )
    if options.plot is not None:
        panels, omitted = (options.metrics, []) if options.metrics else default_panels(experiments)
        save(plot(experiments, panels, window), options.plot)
        if omitted:
            titles = ", ".join(map(title, omitted))
            notes.append(
                f"The plot omits metrics whose values never change: {titles}. Use --metrics to choose the metrics of "
                "the plot."
            )
    lines += [f"note: {note}" for note in notes]
    if options.plot is not None:
        lines.append(f"plot written to {options.plot}")
    say("\n".join(lines))
    return 0


def _read(runs: Sequence[str]) -> Experiments:
    """Read the logs, by name in the order of the arguments. Runs are seeds of one experiment if NAME= says so."""
    experiments: dict[str, list[Log]] = {}
    paths_read: set[tuple[str, Path]] = set()
    for run in runs:
        given_name, path = _split_name(run)
        log = find_log(Path(path)).resolve()
        default_name = log.parent.name if log.name == METRICS else log.stem
        name = given_name or default_name
        if (name, log) in paths_read:
            raise ConfigurationError(f"{log} is listed twice under the name {name!r}. Remove one.")
        if name in experiments and given_name is None:
            raise ConfigurationError(
                f"{run} and another run both have the name {name!r}. Use NAME={path} to set another name, or "
                f"{name}={path} if the runs are seeds of one experiment."
            )
        paths_read.add((name, log))
        experiments.setdefault(name, []).append(read_log(log))
    return experiments


def _split_name(run: str) -> tuple[str | None, str]:
    """Split `NAME=PATH`. The name is None for a path without a name, which may contain an equals sign."""
    if "=" not in run or Path(run).exists():
        return None, run
    name, _, path = run.partition("=")
    return name, path


def _metrics_of_table(experiments: Experiments, metrics: Sequence[str] | None) -> Sequence[str]:
    """Return the metrics that the user names, or else the rewards; raise if they are not logged."""
    available = logged(experiments)
    for metric in metrics or ():
        if metric not in available:
            raise DataError(f"--metrics: {unknown('metric', metric, available)}.")
    metrics = metrics or rewards(experiments)
    if not metrics:
        raise DataError(
            "No run has logged a reward (reward/NAME/mean) or a score (critic/score/mean). Set --metrics to some of "
            f"the logged metrics {listed(available)}."
        )
    return metrics


def _table(experiments: Experiments, metrics: Sequence[str], window: int) -> Table:
    """Return a row for each metric and name, with ± the standard deviation over the runs.

    `first` and `final` are means over `window` steps, `highest` is the maximum of the moving average over `window`
    steps, and `mean` is the mean over all steps.
    """
    header = ("metric", "name", "runs", "steps", f"first {window}", f"final {window}", f"highest {window}", "mean")
    rows: Table = [header]
    for metric in metrics:
        for name, logs in experiments.items():
            row = (title(metric), name, str(len(logs)))
            values = curve(logs, metric)
            if values is None:
                rows.append((*row, "not logged", "", "", "", ""))
                continue
            steps = f"{values.index[0]}-{values.index[-1]}"
            first = values.iloc[:window].mean()
            final = values.iloc[-window:].mean()
            highest = values.rolling(min(window, len(values))).mean().max()
            statistics = [_mean_and_std(statistic) for statistic in (first, final, highest, values.mean())]
            rows.append((*row, steps, *statistics))
    return rows


def _mean_and_std(value_of_run: pd.Series[float]) -> str:
    """Return the mean over the runs, ± their standard deviation if there are several."""
    mean = _number(value_of_run.mean())
    if len(value_of_run) == 1:
        return mean
    return f"{mean} ± {_number(value_of_run.std())}"


def _number(value: float) -> str:
    """Return three decimals, or three significant digits of a small number such as a learning rate.

    >>> _number(1.25), _number(0.0), _number(1e-6)
    ('1.250', '0.000', '1e-06')
    """
    return f"{value:.3g}" if 0 < abs(value) < 0.01 else f"{value:.3f}"


def _remarks(experiments: Experiments, window: int) -> Iterator[str]:
    """Explain the columns of the table."""
    yield f"  first {window}, final {window}: mean over the first and over the last {_steps(window)}."
    yield f"  highest {window}: maximum of the moving average over {_steps(window)}."
    yield "  mean: mean over all steps."
    if max(map(len, experiments.values())) > 1:
        yield "  ±: standard deviation over the runs."


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _notes(experiments: Experiments, metrics: Sequence[str]) -> Iterator[str]:
    """Yield sentences about what was read and what is missing."""
    for logs in experiments.values():
        for log in logs:
            for note in log.notes:
                yield f"{log.path}: {note}"
    rewards_of_table = [metric for metric in metrics if metric.startswith("reward/")]
    curves = [curve(logs, metric) for metric in rewards_of_table for logs in experiments.values()]
    if any(values is None for values in curves):
        yield (
            "Some runs did not log all rewards. Set algorithm.rewards.log=all in these runs to log every reward that "
            "the reward function returns."
        )
