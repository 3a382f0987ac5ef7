"""The recipes' launchers, run for the command that they would start."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.configs import compose

RECIPES = Path(__file__).parents[2] / "recipes"
VARIABLES = {"PATH", "HOME", "PYTHONPATH", "LANG", "LC_ALL", "TMPDIR"}


def environment(**variables: str) -> dict[str, str]:
    """Little of our own environment, so that no variable of it sets up a recipe, and the variables."""
    kept = {name: value for name, value in os.environ.items() if name in VARIABLES}
    return {**kept, "PYTHON": sys.executable, **variables}


def run(recipe: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_script(f"{recipe}/run.sh", *arguments, **variables)


def run_script(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(RECIPES / script), *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def overrides(recipe: str, *arguments: str, **variables: str) -> list[str]:
    """What the launcher gives to `verl.trainer.main_ppo`."""
    done = run(recipe, *arguments, DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stdout)
    assert command[:4] == [sys.executable, "-u", "-m", "verl.trainer.main_ppo"]
    return command[4:]


def composed(recipe: str, *arguments: str, **variables: str) -> Any:
    """The configuration that the launcher would start, as verl composes it."""
    return compose(*overrides(recipe, *arguments, **variables))
