"""The command line: `--help` works without verl, torch and pandas, and describes every option."""

import argparse
import re
import subprocess
import sys

import pytest

from verl_ext import cli

BLOCKED = ("hydra", "numpy", "omegaconf", "pandas", "ray", "torch", "verl")
"""What `--help` must not need: numpy and torch are installed with verl_ext, the others with verl."""


IMPORT_WITHOUT_THEM = f"""
import sys
sys.modules.update(dict.fromkeys({BLOCKED}))
from verl_ext.cli import main
sys.exit(main())
"""


def run_without_libraries(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process in which the packages of `BLOCKED` cannot be imported."""
    command = [sys.executable, "-c", IMPORT_WITHOUT_THEM, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of a command, or the parser of all commands if the name is empty."""
    main_parser, parsers_of_commands = cli.parsers()
    return parsers_of_commands.get(command, main_parser)


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_needs_only_python(command: str) -> None:
    arguments = [command, "--help"] if command else ["--help"]
    done = run_without_libraries(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"usage: verl-ext {command}" in done.stdout
    for action in parser_of(command)._actions:
        for option in action.option_strings:
            assert option in done.stdout


def test_help_lists_each_command_once() -> None:
    text = parser_of("").format_help()
    for name in cli.COMMANDS:
        assert len(re.findall(rf"^ +{name}\b", text, re.MULTILINE)) == 1, name


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_argument_has_a_help_text_and_every_option_a_default(command: str) -> None:
    for action in parser_of(command)._actions:
        assert action.help
        is_help = isinstance(action, argparse._HelpAction)
        if action.option_strings and not is_help and action.dest != "config":
            assert "default" in action.help, action.option_strings


@pytest.mark.parametrize("command", [name for name, command in cli.COMMANDS.items() if command.needs])
def test_error_about_a_missing_package_says_how_to_install_it(command: str) -> None:
    arguments = [command, "x"] if command in ("compare", "report") else [command]
    done = run_without_libraries(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"verl-ext {command}" in done.stderr
    assert f"package {cli.COMMANDS[command].needs}" in done.stderr
    assert "pip install 'verl_ext[verl]'" in done.stderr


def test_error_about_an_unknown_command_names_the_commands() -> None:
    done = run_without_libraries("chek")
    assert done.returncode == 2
    for name in ("chek", *cli.COMMANDS):
        assert name in done.stderr
