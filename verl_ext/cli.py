"""The command line: `verl-ext COMMAND`, also as `python -m verl_ext COMMAND`."""

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from verl_ext import __version__
from verl_ext.errors import IntegrationError, VerlExtError
from verl_ext.files import say

COMMANDS = {
    "check": ("verl_ext.checks.command", "verl", "print every error and warning of a configuration"),
    "compare": ("verl_ext.tools.compare.command", "pandas", "show what estimators would do to the rollouts of a run"),
    "doctor": ("verl_ext.doctor", "", "report whether verl loads this package, and what does not work"),
    "recipes": ("verl_ext.tools.recipes", "", "copy the recipes, to train them without a clone"),
    "rehearse": ("verl_ext.cpu.rehearse", "verl", "train, save, resume and validate a run in miniature, without a GPU"),
    "report": ("verl_ext.tools.report.command", "pandas", "make a table and a picture of the rewards of runs"),
    "show": ("verl_ext.tools.show", "hydra", "print the steps, the formula and the settings of an estimator"),
}
"""Each command: its module, which package it needs that comes with verl, and what it does.

The module has `add_arguments(parser)` and a function of the command's name, which prints and returns the exit status.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 for success."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the encoding of the output may lack a character
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="verl-ext",
        description="Advantage estimators and named rewards for verl.",
        epilog="\n".join(f"{name:8}  {about}" for name, (*_, about) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"verl_ext {__version__}")
    parser.add_argument("command", choices=COMMANDS)
    name = parser.parse_args(given[:1]).command
    path, needed, _ = COMMANDS[name]
    try:
        if needed and find_spec(needed) is None:
            raise IntegrationError(f"{name} needs {needed}, which is not installed: pip install 'verl_ext[verl]'")
        module = importlib.import_module(path)
        parser = argparse.ArgumentParser(prog=f"verl-ext {name}", description=module.__doc__)
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        module.add_arguments(parser)
        # As with verl, settings may stand before and after options.
        status: int = getattr(module, name)(parser.parse_intermixed_args(given[1:]))
        return status
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (VerlExtError, OSError) as error:  # of the system, for example: a file cannot be written
        say(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
