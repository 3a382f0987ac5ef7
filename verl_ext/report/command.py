"""`verl-ext report`: arguments in; tables, picture and page out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from verl_ext.errors import ConfigurationError, DataError, printable
from verl_ext.files import write, writing
from verl_ext.report import follow
from verl_ext.report import groups as dumped
from verl_ext.report.curves import Experiments, check_metrics, rewards
from verl_ext.report.log import Log
from verl_ext.report.outputs import check_outputs
from verl_ext.report.page import page
from verl_ext.report.panels import Panel, of_metrics, panels
from verl_ext.report.plot import plot
from verl_ext.report.reader import Reader, find_log
from verl_ext.report.table import Rows, markdown, plain, rows

MOST = 10**9
"""The largest number of steps or groups in an option."""
DAY = 24 * 60 * 60
RESUMES = 5
"""Number of resumes of a run that are listed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="[NAME=]RUN",
        help="the folder of a run, its .jsonl log or its tensorboard folder; A+B are the parts of one run before and "
        "after it was resumed; runs with the same NAME are seeds of one experiment (default: the name of the folder)",
    )
    parser.add_argument(
        "--metrics", nargs="+", metavar="METRIC", help="default: every named reward, and related curves"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture with one panel per reward")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page with the picture and the tables")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
    parser.add_argument("--title", help="heading of the picture and the page")
    parser.add_argument(
        "--smooth", type=int, default=5, help="steps averaged in each point of the picture (default: 5)"
    )
    parser.add_argument("--window", type=int, default=10, help="steps averaged in first, final and best (default: 10)")
    parser.add_argument("--follow", action="store_true", help="show running trainings in the terminal until Ctrl-C")
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two updates (default: 5)")
    parser.add_argument(
        "--groups",
        action="store_true",
        help="the runs are dumps of advantages (algorithm.verl_ext.dump_dir): show hardest, dead, conflicting groups",
    )
    parser.add_argument("--top", type=int, default=10, help="groups to show of each kind (default: 10)")


def report(options: argparse.Namespace) -> str:
    """Write the requested files; return the text to print."""
    for name in ("smooth", "window", "top"):
        if not 1 <= getattr(options, name) <= MOST:
            raise ConfigurationError(f"--{name} must be at least 1 and at most {MOST}, found {getattr(options, name)}")
    if not 0 < options.interval <= DAY:
        raise ConfigurationError(
            f"--interval must be above 0 and at most {DAY} seconds, a day, found {options.interval:g}"
        )
    kind = "--groups" if options.groups else "--follow" if options.follow else None
    for name in ("plot", "html", "markdown", *(("metrics", "follow") if options.groups else ())):
        if kind is not None and getattr(options, name):
            raise ConfigurationError(f"{kind} only prints text and has no --{name}: leave out one of the two")
    if options.groups:
        return dumped.report([path for run in options.runs for path in named(run)[1]], top=options.top)
    if options.follow:
        return _follow(options)
    logs = [find_log(path) for run in options.runs for path in named(run)[1]]
    check_outputs(logs, plot=options.plot, html=options.html, markdown=options.markdown)
    found = read_runs(options.runs)
    if options.metrics:
        check_metrics(options.metrics, found)
    metrics = options.metrics or rewards(found)
    if not metrics:
        raise DataError("no run has logged a named reward (`reward/.../mean`) or a score: name metrics with --metrics")
    lines = rows(found, metrics, window=options.window)
    text = [plain(lines), *_warnings(found)]
    shown = of_metrics(options.metrics) if options.metrics else panels(found)
    if options.plot is not None:
        with writing(options.plot):
            plot(found, shown, options.plot, smooth=options.smooth, heading=options.title)
        text.append(f"picture: {printable(options.plot)}")
    if options.markdown is not None:
        write(options.markdown, markdown(lines) + "\n")
        text.append(f"table: {printable(options.markdown)}")
    if options.html is not None:
        write(options.html, _page(found, shown, lines, options, len(metrics)))
        text.append(f"page: {printable(options.html)}")
    return "\n".join(text)


Readers = dict[tuple[Path, ...], Reader]


def read_runs(runs: list[str], *, running: Readers | None = None) -> dict[str, list[Log]]:
    """Read the logs, by name in the order of the arguments. The readers in `running` are reused by the next call."""
    readers: Readers = {} if running is None else running
    experiments: dict[str, list[Log]] = {}
    read: set[tuple[str, Path]] = set()
    for name, paths in _names(runs):
        parts = tuple(find_log(path) for path in paths)
        for part in parts:
            if (name, part.resolve()) in read:
                raise ConfigurationError(f"{part} is given twice, as two seeds of {name!r}: leave one out")
            read.add((name, part.resolve()))
        log = readers.setdefault(parts, Reader(parts)).read(running=running is not None)
        experiments.setdefault(name, []).append(log)
    return experiments


def _names(runs: list[str]) -> list[tuple[str, list[Path]]]:
    """The name and the parts of each run. Two runs are seeds of one experiment only if the user names them so."""
    parsed = [named(run) for run in runs]
    names = [name or base(paths[0]) for name, paths in parsed]
    for run, name, (given, _) in zip(runs, names, parsed, strict=True):
        same = [other for other, called in zip(runs, names, strict=True) if called == name]
        if not given and len(same) > 1:
            raise ConfigurationError(
                f"{len(same)} runs are called {name!r}: {', '.join(same)}. Give each its own name, as in ONE={run}, "
                f"or, if they are seeds of one experiment, each the same name, as in {name}={run}"
            )
    return [(name, paths) for name, (_, paths) in zip(names, parsed, strict=True)]


def named(run: str) -> tuple[str, list[Path]]:
    """Split `NAME=A+B` into the name, "" by default, and the parts. An existing path may contain `=` and `+`."""
    name, equals, rest = run.partition("=")
    if not (equals and name and not Path(run).exists()):
        name, rest = "", run
    return name, [Path(rest)] if Path(rest).exists() else [Path(part) for part in rest.split("+")]


def base(path: Path) -> str:
    """The default name of a run: that of its folder."""
    return (path.resolve().parent if path.is_file() else path.resolve()).name


def _page(found: Experiments, shown: list[Panel], lines: Rows, options: argparse.Namespace, count: int) -> str:
    beside = [metric for panel in shown[count:] for metric in panel.metrics]
    tables = [("Rewards", "", lines)]
    if beside:
        more = rows(found, beside, window=options.window)
        tables.append(("Beside the rewards", "", [("metric", *more[0][1:]), *more[1:]]))
    alt = "Curves over training steps of " + ", ".join(panel.title for panel in shown)
    notes = [
        "; ".join([f"{name}: {log.path}, steps {log.steps[0]} to {log.steps[-1]}, {len(log.steps)} logged", *_odd(log)])
        for name, logs in found.items()
        for log in logs
    ]
    draw = partial(plot, found, shown, smooth=options.smooth, heading=options.title)
    return page(options.title or " and ".join(found), draw, alt, tables, notes)


def _warnings(found: Experiments) -> list[str]:
    return [f"{printable(log.path)}: {odd}" for logs in found.values() for log in logs for odd in _odd(log)]


def _odd(log: Log) -> Iterator[str]:
    if log.resumed_after:
        more = len(log.resumed_after) - RESUMES
        listed = ", ".join(map(str, log.resumed_after[:RESUMES]))
        yield f"resumed after step {listed}" + (f" and {more:,} more" if more > 0 else "")
    if log.unreadable:
        yield f"{log.unreadable} unreadable line(s) left out"


def _follow(options: argparse.Namespace) -> str:
    readers: Readers = {}
    follow.follow(
        lambda: read_runs(options.runs, running=readers),
        lambda found: "\n".join([follow.frame(found, options.metrics, window=options.window), *_warnings(found)]),
        sys.stdout,
        interval=options.interval,
    )
    return ""
