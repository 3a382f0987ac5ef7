"""reference/cli.md: a section for each command of verl-ext, from the parsers of the commands.

The page is made from the arguments that a parser has, because the text of `--help` depends on the version of Python and
on the width of the terminal.
"""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from generated_pages.markdown import table
from verl_ext import cli

INTRODUCTION = """
# Command line

The program `verl-ext` has a command for each tool of verl_ext. `python -m verl_ext` is the same program, for
environments whose scripts are not in `PATH`. `verl-ext --version` prints the version. `verl-ext COMMAND --help` prints
the arguments of a command and does not need verl.
"""

EXIT_STATUSES = """
## Exit statuses

| status | meaning |
|---|---|
| 0 | The command succeeded. |
| 1 | An error occurred, or the result is negative, for example if `check` rejects the run. |
| 2 | The command line is invalid. |
| 130 | Ctrl-C ended the command. |
| 141 | The program that reads the output has ended, for example `head`. |
"""


class Addition(NamedTuple):
    """What the page says about a command in addition to its parser."""

    example: str
    guide: str
    """A link to the page that explains the command."""


GUIDE_TO_CHECK = "[Check a run before you submit it](../check.md)"
GUIDE_TO_ANALYZE = "[Analyze a run](../analyze.md)"
ADDITIONS: Mapping[str, Addition] = {
    "check": Addition("verl-ext check --strict --try-reward --config run.yaml", GUIDE_TO_CHECK),
    "compare": Addition("verl-ext compare dumps gdpo 'gdpo algorithm.gdpo.scale=mad'", GUIDE_TO_ANALYZE),
    "doctor": Addition("verl-ext doctor", "[Install](../install.md)"),
    "recipes": Addition("verl-ext recipes experiments", "[Recipes](../../../recipes/README.md)"),
    "rehearse": Addition("verl-ext rehearse --minutes 30 --config run.yaml", GUIDE_TO_CHECK),
    "report": Addition("verl-ext report grpo=runs/1 grpo=runs/2 gdpo=runs/3 --plot report.png", GUIDE_TO_ANALYZE),
    "show": Addition("verl-ext show gdpo algorithm.gdpo.scale=mad", "[Compose an estimator](../methods/compose.md)"),
}


class Argument(NamedTuple):
    """A row of a table of arguments."""

    written: str
    default: str
    description: str


def blocks() -> Iterator[str]:
    """Yield the blocks of the page. If an earlier command has the same argument, the page only names it."""
    _, parsers = cli.parsers()
    yield INTRODUCTION
    yield EXIT_STATUSES
    command_of_argument: dict[Argument, str] = {}
    for command, parser in parsers.items():
        actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
        yield f"## {command}"
        description = _options_as_code(_without_line_breaks(parser.description or ""))
        yield f"{description} Guide: {ADDITIONS[command].guide}."
        if actions:
            yield f"```text\n{_usage(command, actions)}\n```"
        yield f"```bash\n{ADDITIONS[command].example}\n```"
        arguments = [_argument(action) for action in actions]
        new_arguments = [argument for argument in arguments if argument not in command_of_argument]
        repeated_arguments = [argument for argument in arguments if argument in command_of_argument]
        if new_arguments:
            yield table(["argument", "default", "description"], new_arguments)
        if repeated_arguments:
            yield _repeated(repeated_arguments, command_of_argument)
        command_of_argument |= dict.fromkeys(new_arguments, command)


def _without_line_breaks(text: str) -> str:
    """Return a text with one line per paragraph."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]
    return "\n\n".join(paragraphs)


def _usage(command: str, actions: Sequence[argparse.Action]) -> str:
    """Return how a command with arguments is called."""
    words = ["verl-ext", command]
    if any(action.option_strings for action in actions):
        words.append("[OPTIONS]")
    words += [_values(action) for action in actions if not action.option_strings]
    return " ".join(words)


def _values(action: argparse.Action) -> str:
    """Return the placeholder of the values that an argument takes; empty for a switch."""
    if action.nargs == 0:
        return ""
    name = str(action.metavar)
    if action.nargs == "?":
        return f"[{name}]"
    if action.nargs == "*":
        return f"[{name} ...]"
    return f"{name} ..." if action.nargs == "+" else name


def _argument(action: argparse.Action) -> Argument:
    """Return the row of an argument. Its help text says the default in parentheses at the end."""
    help_text = str(action.help) % vars(action)
    description, _, default = help_text.removesuffix(")").partition(" (default: ")
    if not default:
        description = help_text
        is_required = not action.option_strings and action.nargs in (None, "+")
        default = "required" if is_required else "none"
    spellings = [f"{option} {_values(action)}".strip() for option in action.option_strings]
    written = ", ".join(f"`{spelling}`" for spelling in spellings or [str(action.metavar)])
    return Argument(written, default, _options_as_code(description))


def _options_as_code(text: str) -> str:
    """Return a text in which options such as --config are code."""
    return re.sub(r"(?<![\w-])--[a-z-]+", r"`\g<0>`", text)


def _repeated(arguments: Sequence[Argument], command_of_argument: Mapping[Argument, str]) -> str:
    """Return a sentence that names arguments that earlier commands have as well."""
    (command,) = {command_of_argument[argument] for argument in arguments}
    names = ", ".join(argument.written for argument in arguments)
    return f"These arguments are the same as for [`{command}`](#{command}): {names}."
