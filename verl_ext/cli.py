"""The command line: `verl-ext doctor`, `report` and `show`, also as `python -m verl_ext ...`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence

from verl_ext import __version__
from verl_ext import show as show_command
from verl_ext.errors import VerlExtError, printable
from verl_ext.report import command as report_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0 when all is well."""
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:  # not the standard output
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        if isinstance(error, BrokenPipeError):  # the reader, `head` for instance, has seen enough
            return 128 + signal.SIGPIPE
        sys.stderr.write(f"the output cannot be written: {error}\n")
        return 1
    return status


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="verl-ext", description="Advantage estimators and named rewards for verl.")
    parser.add_argument("--version", action="version", version=f"verl_ext {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor",
        help="say whether verl loads this package, and what does not hold",
        description="Import verl as a training process does and report versions, entry point, registered estimators "
        "and hooks. Exit status 1 if a run with these estimators would not work.",
    )
    doctor.add_argument("--verbose", action="store_true", help="show the tracebacks of what failed")
    report = commands.add_parser(
        "report",
        help="a table and a picture of the rewards of one or several runs",
        description="Compare runs by what verl's file logger wrote (trainer.logger=[console,file]).",
    )
    report_command.add_arguments(report)
    show = commands.add_parser(
        "show",
        help="the steps, the formula and the settings of an estimator",
        description="Print what an estimator does under given settings, and the list of steps that is the same.",
    )
    show_command.add_arguments(show)
    options = parser.parse_args(arguments)
    if options.command == "report":
        return _printed(report_command.report, options)
    if options.command == "show":
        return _printed(show_command.show, options)
    from verl_ext.integration.doctor import diagnose

    return diagnose(verbose=options.verbose)


def _printed(command: Callable[[argparse.Namespace], str], options: argparse.Namespace) -> int:
    try:
        text = command(options)
    except VerlExtError as error:
        sys.stderr.write(printable(f"{type(error).__name__}: {error}\n", keep="\n"))
        return 1
    sys.stdout.write(text + "\n")
    return 0
