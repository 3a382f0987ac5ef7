"""Print a table and draw a plot of the rewards of runs, from the logs of verl's file logger."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from verl_ext.errors import ConfigurationError, DataError, listed, unknown
from verl_ext.files import METRICS, say
from verl_ext.tools.report.curves import Experiments, curve, default_panels, logged, rewards, rows, title, window_of
from verl_ext.tools.report.logs import Log, find_log, read_log
from verl_ext.tools.report.plot import plot, save
from verl_ext.tools.tables import plain


def report(options: argparse.Namespace) -> int:
    """Print the table, and write the plot if asked to."""
    experiments = _read(options.runs)
    for metric in options.metrics or ():
        if metric not in logged(experiments):
            raise DataError(f"--metrics: {unknown('metric', metric, logged(experiments))}.")
    metrics = options.metrics or rewards(experiments)
    if not metrics:
        raise DataError(
            "No run has logged a reward (reward/NAME/mean) or a score (critic/score/mean). Set --metrics to some of "
            f"the logged metrics {listed(logged(experiments))}."
        )
    window = window_of(experiments, metrics, options.window)
    notes = [*_notes(experiments, metrics)]
    if window < options.window:
        notes.append(
            f"The window is {_steps(window)} instead of {options.window}, because it can be at most half of the "
            "shortest run."
        )
    lines = [plain(rows(experiments, metrics, window)), *_remarks(experiments, window)]
    if options.plot is not None:
        panels, omitted = (options.metrics, []) if options.metrics else default_panels(experiments)
        save(plot(experiments, panels, window), options.plot)
        if omitted:
            notes.append(
                f"The plot omits metrics whose values never change: {', '.join(map(title, omitted))}. Use --metrics to "
                "choose the metrics of the plot."
            )
    lines += [f"note: {note}" for note in notes]
    if options.plot is not None:
        lines.append(f"plot written to {options.plot}")
    say("\n".join(lines))
    return 0


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
            yield from (f"{log.path}: {note}" for note in log.notes)
    missing = (metric for metric in metrics if any(curve(logs, metric) is None for logs in experiments.values()))
    if any(metric.startswith("reward/") for metric in missing):
        yield (
            "Some runs did not log all rewards. Set algorithm.rewards.log=all in these runs to log every reward that "
            "the reward function returns."
        )


def _read(runs: list[str]) -> Experiments:
    """Read the logs, by name in the order of the arguments. Runs are seeds of one experiment if NAME= says so."""
    experiments: dict[str, list[Log]] = {}
    read: set[tuple[str, Path]] = set()
    for run in runs:
        name, equals, rest = run.partition("=") if "=" in run and not Path(run).exists() else ("", "", run)
        log = find_log(Path(rest)).resolve()
        name = name or (log.parent.name if log.name == METRICS else log.stem)
        if (name, log) in read:
            raise ConfigurationError(f"{log} is listed twice under the name {name!r}. Remove one.")
        if name in experiments and not equals:
            raise ConfigurationError(
                f"{run} and another run both have the name {name!r}. Use NAME={rest} to set another name, or "
                f"{name}={rest} if the runs are seeds of one experiment."
            )
        read.add((name, log))
        experiments.setdefault(name, []).append(read_log(log))
    return experiments
