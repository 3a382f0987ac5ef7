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
    """Load a file as `OmegaConf.load` does. A file of verl is read once, because YAML takes half of the time."""
    path = str(getattr(file, "name", file))
    if path.startswith(HOME):
        return copy.deepcopy(_load_once(path))
    return _load(file)


OmegaConf.load = load


def compose(*overrides: str) -> Any:
    """Return the configuration of `python -m verl.trainer.main_ppo OVERRIDES`.

    The number of responses per prompt is 8, because verl_ext warns of verl's default of 1.
    """
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", overrides=["actor_rollout_ref.rollout.n=8", *overrides])


_composed_once = functools.cache(compose)


def compose_quickly(*overrides: str) -> Any:
    """Return the same configuration as `compose`. Hydra, which takes seconds, composes only the presets."""
    presets = [override for override in overrides if override.startswith("+verl_ext=")]
    config = copy.deepcopy(_composed_once(*presets))
    OmegaConf.set_struct(config, False)
    for override in overrides:
        if override not in presets:
            _apply(override, config)
    return config


def _apply(text: str, config: Any) -> None:
    """Apply an override of a command line to a configuration."""
    override = OverridesParser.create().parse_override(text)
    path = override.key_or_group
    if override.is_delete():
        parent, _, name = path.rpartition(".")
        section = OmegaConf.select(config, parent) if parent else config
        del section[name]
    else:
        OmegaConf.update(config, path, override.value(), force_add=True)
