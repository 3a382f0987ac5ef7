"""The recipes' scripts and configurations, as a user starts them."""

import os
import sys
from pathlib import Path

import hydra

from tests import configs  # noqa: F401 - reads verl's files once, and loads the presets

RECIPES = Path(__file__).parents[2] / "recipes"
ARMS = sorted(
    f"{path.parent.name}/{path.stem}"
    for recipe in ("gsm8k", "math", "tool_calling")
    for path in (RECIPES / recipe).glob("*.yaml")
    if not path.stem.startswith("base")
)
VARIABLES = {"PATH", "HOME", "PYTHONPATH", "LANG", "LC_ALL", "TMPDIR"}


def environment(**variables: str) -> dict[str, str]:
    """Little of the environment of the tests, so that no variable of it reaches a recipe, and these variables."""
    kept = {name: value for name, value in os.environ.items() if name in VARIABLES}
    return {**kept, "PYTHON": sys.executable, **variables}


def composed(arm: str):
    """The configuration with which verl would start, before interpolations are resolved."""
    with hydra.initialize_config_dir(str(RECIPES), version_base=None):
        return hydra.compose(arm)


def estimator(arm: str) -> str:
    return arm.partition("/")[2].partition("-")[0]


def on_the_cpu(arm: str) -> str:
    """The override with which an arm runs without a GPU."""
    return "verl_ext=cpu" if estimator(arm) == "grpo" else f"verl_ext=[cpu,{estimator(arm)}]"
