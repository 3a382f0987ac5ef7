"""The command line: `verl-ext check`, `compare`, `doctor`, `report` and `show`, also as `python -m verl_ext ...`."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence

from verl_ext import __version__
from verl_ext.errors import VerlExtError, printable
from verl_ext.integration import check as check_command
from verl_ext.tools import show as show_command
from verl_ext.tools.compare import command as compare_command
from verl_ext.tools.report import command as report_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 for success."""
    _accept_all_output()
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:  # the error is about a file, not about stdout
            problem = f"{error.filename} cannot be read or written: {error.strerror or error}"
            sys.stderr.write(printable(problem) + "\n")
            return 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
        if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has closed the pipe
            return 128 + signal.SIGPIPE
        sys.stderr.write(f"the output cannot be written: {error}\n")
        return 1
    return status


def _accept_all_output() -> None:
    """Escape characters that the output's encoding lacks, and discard what goes to a closed output."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", errors="backslashreplace"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="verl-ext", description="Advantage estimators and named rewards for verl.")
    parser.add_argument("--version", action="version", version=f"verl_ext {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check",
        help="print every error and warning of a configuration, without a run",
        description="Compose a configuration as `python -m verl.trainer.main_ppo` does and print every error and "
        "warning that this package has for it. Exit status 1 if it would be refused.",
    )
    check_command.add_arguments(check)
    compare = commands.add_parser(
        "compare",
        help="show what estimators would do to the rollouts of a run",
        description="Compute the advantages that estimators give to rollouts which a run has written, and compare them "
        "with those of grpo.",
    )
    compare_command.add_arguments(compare)
    doctor = commands.add_parser(
        "doctor",
        help="report whether verl loads this package, and what does not work",
        description="Import verl as a training process does and report versions, entry point, registered estimators "
        "and hooks. Exit status 1 if a run with these estimators would not work.",
    )
    doctor.add_argument("--verbose", action="store_true", help="show the tracebacks of what failed")
    report = commands.add_parser(
        "report",
        help="make a table and a picture of the rewards of runs",
        description="Compare runs by what verl's file logger wrote ('trainer.logger=[console,file]').",
    )
    report_command.add_arguments(report)
    show = commands.add_parser(
        "show",
        help="print the steps, the formula and the settings of an estimator",
        description="Print what an estimator does under the given settings, and the equivalent list of steps.",
    )
    show_command.add_arguments(show)
    options = _parsed(parser, arguments)
    if options.command == "check":
        return _printed(check_command.check, options)
    if options.command == "compare":
        return _printed(compare_command.compare, options)
    if options.command == "report":
        return _printed(report_command.report, options)
    if options.command == "show":
        return _printed(show_command.show, options)
    from verl_ext.integration.doctor import diagnose

    return diagnose(verbose=options.verbose)


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments. Settings may come before and after options as with verl, which argparse does not support."""
    options, rest = parser.parse_known_args(arguments)
    several = next((name for name in ("overrides", "variants") if hasattr(options, name)), None)
    if rest and (several is None or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if several is not None:
        setattr(options, several, [*getattr(options, several), *rest])
    return options


def _printed(command: Callable[[argparse.Namespace], str | tuple[str, int]], options: argparse.Namespace) -> int:
    """Print what a command returns: a text, perhaps with an exit status."""
    try:
        found = command(options)
    except VerlExtError as error:
        sys.stderr.write(printable(f"{type(error).__name__}: {error}\n", keep="\n\t"))
        return 1
    text, status = (found, 0) if isinstance(found, str) else found
    sys.stdout.write(text + "\n")
    return status
