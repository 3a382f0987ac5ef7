"""Fixtures that call the commands `compare`, `report` and `show`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd
import pytest

from tests.tools.run_files import run_command

Command = Callable[..., str]


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `compare` and returns what it prints."""
    return partial(run_command, capsys, "compare")


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `report` and returns what it prints."""
    return partial(run_command, capsys, "report")


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs `show` and returns what it prints."""
    return partial(run_command, capsys, "show")


@pytest.fixture
def compared_advantages(tmp_path: Path, compare: Command) -> Callable[..., pd.DataFrame]:
    """Return a function that runs `compare` and returns the table that it writes to `--output`."""

    def compared_advantages(rollouts: Path, *arguments: object) -> pd.DataFrame:
        output = tmp_path / "out.parquet"
        compare(rollouts, *arguments, "--output", output)
        return pd.read_parquet(output)

    return compared_advantages
