"""`verl-ext report`: arguments in, table and picture out."""

from __future__ import annotations

import argparse
from pathlib import Path

from verl_ext.errors import ConfigurationError, DataError
from verl_ext.report.curves import check_metrics, rewards
from verl_ext.report.log import Log, find_log, read_log
from verl_ext.report.table import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="[NAME=]RUN",
        help="a run's folder or its .jsonl log; runs of one NAME are seeds of one experiment (default: the folder's)",
    )
    parser.add_argument("--metrics", nargs="+", metavar="METRIC", help="default: the mean of every named reward")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture with one panel a reward")
    parser.add_argument("--title", help="heading of the picture")
    parser.add_argument("--smooth", type=int, default=5, help="steps a point of the picture averages (default: 5)")
    parser.add_argument("--window", type=int, default=10, help="steps at start and end for the table (default: 10)")


def report(options: argparse.Namespace) -> str:
    """Write the picture if asked for; the text to print."""
    for name in ("smooth", "window"):
        if getattr(options, name) < 1:
            raise ConfigurationError(f"--{name} must be at least 1, found {getattr(options, name)}")
    groups = read_runs(options.runs)
    if options.metrics:
        check_metrics(options.metrics, groups)
    metrics = options.metrics or rewards(groups)
    if not metrics:
        raise DataError("no run has logged a named reward (`reward/.../mean`) or a score: choose by --metrics")
    lines = [table(groups, metrics, window=options.window)]
    for log in (log for logs in groups.values() for log in logs if log.unreadable):
        lines.append(f"{log.path}: {log.unreadable} unreadable line(s) left out")
    if options.plot is not None:
        from verl_ext.report.plot import plot

        plot(groups, metrics, options.plot, smooth=options.smooth, heading=options.title)
        lines.append(f"picture: {options.plot}")
    return "\n".join(lines)


def read_runs(runs: list[str]) -> dict[str, list[Log]]:
    """Logs by name, in the order of the arguments."""
    groups: dict[str, list[Log]] = {}
    for run in runs:
        name, path = _named(run)
        groups.setdefault(name, []).append(read_log(find_log(path)))
    return groups


def _named(run: str) -> tuple[str, Path]:
    """`NAME=RUN`, or a path alone, which may hold an `=` if it exists."""
    name, equals, rest = run.partition("=")
    if equals and name and not Path(run).exists():
        return name, Path(rest)
    path = Path(run)
    return (path.resolve().parent if path.is_file() else path.resolve()).name, path
