"""`scripts/test_against.sh`, with a script in the place of Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAKE = """#!/bin/bash
echo "${PYTHONPATH%%:*}|$*" >>"$CALLS"
[[ "$*" != *"$FAILS"* ]]
"""


@pytest.fixture
def against(tmp_path: Path):
    """Runs the script on a folder; its exit status, and what it asked of Python, each with the first of PYTHONPATH."""
    (tmp_path / "tree/verl").mkdir(parents=True)
    (tmp_path / "tree/verl/__init__.py").touch()
    (tmp_path / "python").write_text(FAKE)
    (tmp_path / "python").chmod(0o755)

    def run(*arguments: str, fails: str = "nothing") -> tuple[int, list[str], str]:
        calls = tmp_path / "calls"
        calls.write_text("")
        done = subprocess.run(
            [ROOT / "scripts/test_against.sh", *arguments],
            cwd=tmp_path,
            env={**os.environ, "CALLS": str(calls), "FAILS": fails},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, calls.read_text().splitlines(), done.stderr

    return run


def test_doctor_and_the_tests_run_with_the_tree_first_on_the_path(against, tmp_path: Path) -> None:
    status, calls, _ = against("tree", "--python", "./python", "--", "-k", "name")
    assert status == 0
    _, doctor, tests = calls
    assert doctor == f"{tmp_path}/tree|-m verl_ext doctor"
    assert tests.startswith(f"{tmp_path}/tree|-m pytest ")
    assert tests.endswith("-k name")
    for path in (word for word in tests.split() if word.startswith("tests/")):
        assert (ROOT / path.partition("::")[0]).exists()


@pytest.mark.parametrize("fails", ["doctor", "pytest"])
def test_either_failure_is_the_exit_status_and_both_run(against, fails: str) -> None:
    status, calls, _ = against("tree", "--python", "./python", fails=fails)
    assert status == 1
    assert len(calls) == 3


@pytest.mark.parametrize("arguments", [(), ("--python", "x"), ("tree", "--python"), ("tree", "more")])
def test_wrong_arguments_print_the_usage(against, arguments: tuple[str, ...]) -> None:
    status, calls, told = against(*arguments)
    assert (status, calls) == (2, [])
    assert "scripts/test_against.sh FOLDER" in told


def test_a_folder_without_verl_is_refused(against, tmp_path: Path) -> None:
    status, calls, told = against(".", "--python", "./python")
    assert (status, calls) == (2, [])
    assert str(tmp_path) in told
