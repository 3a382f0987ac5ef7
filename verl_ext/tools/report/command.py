"""Make a table and a picture of the rewards of runs, from what verl's file logger wrote."""

import argparse
from pathlib import Path

from verl_ext.errors import ConfigurationError, DataError, unknown
from verl_ext.files import METRICS, say
from verl_ext.tools.report.curves import Experiments, logged, pictured, rewards, rows, width_of
from verl_ext.tools.report.logs import Log, find_log, read_log
from verl_ext.tools.report.plot import plot, save
from verl_ext.tools.tables import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="[NAME=]RUN",
        help="the folder of a run, or the .jsonl log of verl's file logger; runs with the same NAME are seeds of one "
        "experiment (default: the name of the log, of metrics.jsonl that of its folder)",
    )
    parser.add_argument("--metrics", nargs="+", metavar="METRIC", help="default: every reward")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture with a panel per metric")
    parser.add_argument(
        "--window",
        type=int,
        default=10,
        help="steps averaged in first, final and highest, at most half of the shortest run (default: 10)",
    )


def report(options: argparse.Namespace) -> int:
    """Write the requested files and print the table."""
    experiments = _read(options.runs)
    for metric in options.metrics or ():
        if metric not in logged(experiments):
            raise DataError(unknown("metric", metric, logged(experiments)))
    metrics = options.metrics or rewards(experiments)
    if not metrics:
        raise DataError("no run has logged a named reward (`reward/.../mean`) or a score: name metrics with --metrics")
    width = width_of(experiments, metrics, options.window)
    table = rows(experiments, metrics, width)
    notes = [f"{log.path}: {note}" for logs in experiments.values() for log in logs for note in log.notes]
    if width < options.window:
        notes.append(f"first, final and highest are means of {width} step(s), half of the shortest run at most")
    if any("not logged" in row for row in table):
        notes.append("not logged: algorithm.rewards.log=all logs every reward that the reward function returns")
    text = [plain(table), *notes]
    if options.plot is not None:
        save(plot(experiments, options.metrics or pictured(experiments)), options.plot)
        text.append(f"picture: {options.plot}")
    say("\n".join(text))
    return 0


def _read(runs: list[str]) -> Experiments:
    """Read the logs, by name in the order of the arguments. Two runs are seeds only if the user names them so."""
    experiments: dict[str, list[Log]] = {}
    read: set[tuple[str, Path]] = set()
    for run in runs:
        name, equals, rest = run.partition("=") if "=" in run and not Path(run).exists() else ("", "", run)
        log = find_log(Path(rest)).resolve()
        name = name or (log.parent.name if log.name == METRICS else log.stem)
        if (name in experiments and not equals) or (name, log) in read:
            raise ConfigurationError(f"{run}: {name} is there already: write NAME={rest} with a name of its own")
        read.add((name, log))
        experiments.setdefault(name, []).append(read_log(log))
    return experiments
