"""The command line: `--help` works without verl, torch and pandas, and describes every option."""

import argparse
import re
import subprocess
import sys

import pytest

from verl_ext import cli

BLOCKED = ("hydra", "numpy", "omegaconf", "pandas", "ray", "torch", "verl")
"""What `--help` must not need: numpy and torch are installed with verl_ext, the others with verl."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process in which the packages of `BLOCKED` cannot be imported."""
    code = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED})); from verl_ext.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_is_printed_where_only_python_is_installed(command: str) -> None:
    done = run(*filter(None, [command, "--help"]))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"usage: verl-ext {command}" in done.stdout
    parser = cli.parsers()[1].get(command, cli.parsers()[0])
    assert all(name in done.stdout for action in parser._actions for name in action.option_strings)


def test_help_lists_each_command_once() -> None:
    text = cli.parsers()[0].format_help()
    assert [len(re.findall(rf"^ +{name}\b", text, re.MULTILINE)) for name in cli.COMMANDS] == [1] * len(cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_argument_says_what_it_is_and_every_option_its_default(command: str) -> None:
    for action in cli.parsers()[1][command]._actions:
        assert action.help
        if action.option_strings and not isinstance(action, argparse._HelpAction) and action.dest != "config":
            assert "default" in action.help, action.option_strings


@pytest.mark.parametrize("command", [name for name, command in cli.COMMANDS.items() if command.needs])
def test_a_command_that_needs_a_missing_package_says_how_to_install_it(command: str) -> None:
    arguments = [command, "x"] if command in ("compare", "report") else [command]
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"verl-ext {command}" in done.stderr
    assert f"package {cli.COMMANDS[command].needs}" in done.stderr
    assert "pip install 'verl_ext[verl]'" in done.stderr


def test_an_unknown_command_is_an_error_that_names_the_commands() -> None:
    done = run("chek")
    assert done.returncode == 2
    assert all(name in done.stderr for name in ("chek", *cli.COMMANDS))
