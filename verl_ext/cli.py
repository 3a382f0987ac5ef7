"""The command line: `verl-ext COMMAND`, also as `python -m verl_ext COMMAND`.

Every option of every command is declared here, so that `--help` needs neither verl nor torch. The module of a command
is imported when the command runs.
"""

import argparse
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from verl_ext import __version__
from verl_ext.errors import IntegrationError, VerlExtError
from verl_ext.files import say

Parser = argparse.ArgumentParser


def add_configuration(parser: Parser) -> None:
    """Add the arguments of `verl.trainer.main_ppo`, so that a training command can be pasted."""
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="setting as on verl's command line, for example algorithm.adv_estimator=gdpo",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="primary configuration file; replaces --config-path and --config-name",
    )
    parser.add_argument(
        "--config-path",
        "-cp",
        type=Path,
        metavar="FOLDER",
        help="folder of the primary configuration file (default: the configurations of verl's trainer)",
    )
    parser.add_argument(
        "--config-name",
        "-cn",
        default="ppo_trainer",
        metavar="NAME",
        help="name of the primary configuration file, without .yaml (default: %(default)s)",
    )


def add_reward_trial(parser: Parser) -> None:
    """Add the arguments that say how the reward function is called."""
    parser.add_argument(
        "--responses",
        type=Path,
        metavar="FILE",
        help="JSONL file with one response per row: a string, or a list of strings for a multi-turn session, whose "
        "turns are scored as one text (default: only responses made from the ground truth are scored)",
    )
    parser.add_argument(
        "--answer-template",
        action="append",
        default=[],
        metavar="TEXT",
        help="response format in which {} stands for the ground truth, for example 'The answer is {}'; can be repeated "
        "(default: only the built-in templates are tried)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20,
        metavar="S",
        help="timeout per response in seconds; ten times as long until the first response is scored "
        "(default: %(default)s)",
    )


def add_check(parser: Parser) -> None:
    """Add the arguments of `check`."""
    add_configuration(parser)
    parser.add_argument(
        "--strict",
        action="store_true",
        help="treat warnings and notes as errors: exit with status 1 (default: off)",
    )
    parser.add_argument(
        "--try-reward", action="store_true", help="call the reward function on rows of the training data (default: off)"
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=8,
        metavar="N",
        help="number of training rows to score with --try-reward (without --responses at least one per file and "
        "data_source), plus one row per validation file and data_source (default: %(default)s)",
    )
    add_reward_trial(parser)


def add_rehearse(parser: Parser) -> None:
    """Add the arguments of `rehearse`."""
    add_configuration(parser)
    parser.add_argument(
        "--rows",
        type=int,
        default=100,
        metavar="N",
        help="number of training rows on which the reward function is tried first; 0 skips this (default: %(default)s)",
    )
    add_reward_trial(parser)
    parser.add_argument(
        "--minutes",
        type=float,
        default=20,
        metavar="M",
        help="time limit for the whole rehearsal in minutes (default: %(default)s)",
    )


def add_compare(parser: Parser) -> None:
    """Add the arguments of `compare`."""
    parser.add_argument(
        "rollouts",
        type=Path,
        metavar="ROLLOUTS",
        help="file or folder with scored responses: verl_ext's dump_dir, verl's rollout_data_dir or "
        "validation_data_dir, or a .parquet, .jsonl or .csv table with one row per response",
    )
    parser.add_argument(
        "variants",
        nargs="*",
        metavar="VARIANT",
        help="an estimator with its settings as one quoted argument ('gdpo algorithm.gdpo.scale=mad'), a list of steps "
        "('[weighted_sum,center]'), or a setting KEY=VALUE for all variants (default: the settings of the run, if the "
        "dump stores them)",
    )
    parser.add_argument(
        "--prompt",
        metavar="COLUMN",
        help="column that identifies the prompt of a response (default: uid, or input and gts as verl writes them)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="parquet file to write with the advantages of every trajectory (default: none)",
    )


def add_report(parser: Parser) -> None:
    """Add the arguments of `report`."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="[NAME=]RUN",
        help="output folder of a run, or the .jsonl file of verl's file logger; runs with the same NAME are seeds of "
        "one experiment (default: NAME is the name of the file, or of the folder if the file is metrics.jsonl)",
    )
    parser.add_argument(
        "--metrics", nargs="+", metavar="METRIC", help="metrics to show (default: the mean of every reward)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="image file to write with one panel per metric (default: none)"
    )
    parser.add_argument(
        "--window",
        type=int,
        default=10,
        metavar="N",
        help="number of steps that the table and the plot average over; at most half of the shortest run "
        "(default: %(default)s)",
    )


def add_show(parser: Parser) -> None:
    """Add the arguments of `show`."""
    parser.add_argument(
        "estimator", nargs="?", metavar="ESTIMATOR", help="name of an estimator (default: list all estimators)"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="setting as on verl's command line, for example algorithm.gdpo.scale=mad",
    )


def add_recipes(parser: Parser) -> None:
    """Add the arguments of `recipes`."""
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path(),
        metavar="FOLDER",
        help="folder in which a folder `recipes` is created (default: the current folder)",
    )


def add_nothing(parser: Parser) -> None:
    """Add no argument."""


class Command(NamedTuple):
    """A command: the module has a function of the command's name that prints and returns the exit status."""

    module: str
    needs: str
    """A package that is installed together with verl; empty if the command runs without."""
    add_arguments: Callable[[Parser], None]
    summary: str
    details: str = ""


COMMANDS = {
    "check": Command(
        "verl_ext.checks.command",
        "verl",
        add_check,
        "validate the configuration of a run before it starts",
        "Pass the arguments of `python -m verl.trainer.main_ppo`. Neither Ray nor a model is started.\n"
        "With --try-reward the reward function is called on rows of the training data.\n"
        "The exit status is 1 if verl_ext or verl rejects the run.",
    ),
    "compare": Command(
        "verl_ext.tools.compare.command",
        "pandas",
        add_compare,
        "show how other estimators would change the advantages of scored responses",
        "The baseline is always GRPO on the score. The scored responses may come from a run or from any table.",
    ),
    "doctor": Command(
        "verl_ext.doctor",
        "",
        add_nothing,
        "report whether verl loads verl_ext in this environment",
        "Run doctor in every environment that runs verl, on every node. The exit status is 1 if a check failed.",
    ),
    "recipes": Command(
        "verl_ext.tools.recipes",
        "",
        add_recipes,
        "copy the recipes, so that they can be run without a clone",
        "The recipes contain data preparation, configurations, launch scripts and evaluation.",
    ),
    "rehearse": Command(
        "verl_ext.cpu.rehearse",
        "verl",
        add_rehearse,
        "train, save, resume and validate a scaled-down copy of a run on the CPU",
        "Pass the arguments of `python -m verl.trainer.main_ppo`. The rehearsal runs verl's pipeline with your\n"
        "data, tokenizer, tools, reward function and estimator. The models are small and have random weights.\n"
        "Logs and metrics are written to the folder `rehearsal` in trainer.default_local_dir.\n"
        "The exit status is 1 if a stage failed.",
    ),
    "report": Command(
        "verl_ext.tools.report.command",
        "pandas",
        add_report,
        "summarize the rewards of runs in a table and a plot",
        "The input are the files that verl's file logger writes (trainer.logger=[console,file]).",
    ),
    "show": Command(
        "verl_ext.tools.show",
        "hydra",
        add_show,
        "print the steps, the formula and the settings of an estimator",
        "The last line is the list of steps for `compose` that is equivalent to the estimator.",
    ),
}


def parsers() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the program and the parser of each command."""
    program = Parser(prog="verl-ext", description="Multi-reward advantage estimators for verl.")
    program.add_argument("--version", action="version", version=f"verl_ext {__version__}")
    group = program.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands = {}
    for name, command in COMMANDS.items():
        heading = command.summary[0].upper() + command.summary[1:] + "."
        commands[name] = group.add_parser(
            name,
            help=command.summary,
            description=f"{heading}\n\n{command.details}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(commands[name])
    return program, commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 for success."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the encoding of the output may lack a character
    given = list(sys.argv[1:] if arguments is None else arguments)
    program, commands = parsers()
    if not given or given[0] not in commands:
        program.parse_args(given)  # prints the help or the version, or reports an unknown command
    name = given[0]
    command = COMMANDS[name]
    # As with verl, settings may stand before and after options.
    options = commands[name].parse_intermixed_args(given[1:])
    try:
        if command.needs and find_spec(command.needs) is None:
            raise IntegrationError(
                f"`verl-ext {name}` needs the package {command.needs}, which is not installed. "
                "Install it with: pip install 'verl_ext[verl]'"
            )
        run = getattr(importlib.import_module(command.module), name)
        status: int = run(options)
        return status
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout again at exit
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (VerlExtError, OSError) as error:  # an OSError, for example, if a file cannot be written
        say(f"error: {error}", file=sys.stderr)
        return 1
