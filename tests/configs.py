"""verl's own configuration, composed as its command line does."""

import copy
import functools
from pathlib import Path
from typing import Any

import hydra
import verl  # loads the plugin, which stores the presets
from hydra.core.override_parser.overrides_parser import OverridesParser
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


_composed_once = functools.cache(compose)


def compose_quickly(*overrides: str) -> Any:
    """As `compose`, without the seconds that Hydra takes for each; only a preset needs it."""
    presets = [text for text in overrides if text.startswith("+verl_ext=")]
    config = copy.deepcopy(_composed_once(*presets))
    OmegaConf.set_struct(config, False)
    for text in (text for text in overrides if text not in presets):
        override = OverridesParser.create().parse_override(text)
        if override.is_delete():
            parent, _, name = override.key_or_group.rpartition(".")
            del (OmegaConf.select(config, parent) if parent else config)[name]
        else:
            OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
    return config
