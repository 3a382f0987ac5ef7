"""verl's own configuration, composed as its command line does."""

import copy
import functools
from pathlib import Path
from typing import Any

import hydra
import verl  # loads the plugin, which stores the presets
from omegaconf import OmegaConf

HOME = str(Path(verl.__file__).parent)
_load = OmegaConf.load
_load_once = functools.cache(_load)


def load(file: Any) -> Any:
    """`OmegaConf.load`, which reads a file of verl's once: its YAML takes half of a composition's time."""
    path = str(getattr(file, "name", file))
    return copy.deepcopy(_load_once(path)) if path.startswith(HOME) else _load(file)


OmegaConf.load = load


def compose(*overrides: str) -> Any:
    """`python -m verl.trainer.main_ppo OVERRIDES`, as far as Hydra goes.

    With 8 responses per prompt: verl's default of 1 is warned of.
    """
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.n=8", *overrides])
