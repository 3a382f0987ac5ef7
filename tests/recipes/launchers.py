"""The recipes' scripts and configurations, as a user starts them."""

import os
import sys
from pathlib import Path

import hydra

from tests import configs  # noqa: F401 - reads verl's files once, and loads the presets

RECIPES = Path(__file__).parents[2] / "recipes"


def config_names(recipe: str) -> list[str]:
    """Return the names of a recipe's configs, such as `gsm8k/gdpo`, without those that others extend."""
    stems = sorted(path.stem for path in (RECIPES / recipe).glob("*.yaml"))
    return [f"{recipe}/{stem}" for stem in stems if not stem.startswith("base")]


CONFIGS = [*config_names("gsm8k"), *config_names("math"), *config_names("tool_calling")]
KEPT_VARIABLES = {"PATH", "HOME", "PYTHONPATH", "LANG", "LC_ALL", "TMPDIR"}


def environment(**variables: str) -> dict[str, str]:
    """Return the variables of a process that starts a recipe: few of this process, and the given ones."""
    kept = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES}
    return {**kept, "PYTHON": sys.executable, **variables}


def composed(name: str):
    """Return the configuration with which verl would start, before interpolations are resolved."""
    with hydra.initialize_config_dir(str(RECIPES), version_base=None):
        return hydra.compose(name)


def estimator(name: str) -> str:
    """Return the estimator of a config: `math/hadw-dapo` has hadw."""
    file_name = name.partition("/")[2]
    return file_name.partition("-")[0]


def on_the_cpu(name: str) -> str:
    """Return the override with which a config runs without a GPU."""
    return "verl_ext=cpu" if estimator(name) == "grpo" else f"verl_ext=[cpu,{estimator(name)}]"
