"""The recipes' scripts and configurations, as a user starts them."""

import os
import sys
from pathlib import Path

import hydra

from tests import configs  # noqa: F401 - reads verl's files once, and loads the presets

RECIPES = Path(__file__).parents[2] / "recipes"
CONFIGS = sorted(
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


def composed(name: str):
    """The configuration with which verl would start, before interpolations are resolved."""
    with hydra.initialize_config_dir(str(RECIPES), version_base=None):
        return hydra.compose(name)


def estimator(name: str) -> str:
    return name.partition("/")[2].partition("-")[0]


def on_the_cpu(name: str) -> str:
    """The override with which a config runs without a GPU."""
    return "verl_ext=cpu" if estimator(name) == "grpo" else f"verl_ext=[cpu,{estimator(name)}]"
