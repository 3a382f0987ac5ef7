"""verl's own configuration, composed as its command line does."""

from __future__ import annotations

from typing import Any

import hydra
import verl  # noqa: F401 - loads the plugin, which stores the presets


def compose(*overrides: str, config_name: str = "ppo_trainer") -> Any:
    """`python -m verl.trainer.main_ppo --config-name CONFIG_NAME OVERRIDES`, as far as Hydra goes.

    With 8 responses per prompt: verl's default of 1 is warned of.
    """
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose(config_name, overrides=["actor_rollout_ref.rollout.n=8", *overrides])
