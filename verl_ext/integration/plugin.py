"""The plugin: verl imports this module in every process, through the `verl.plugins` entry point.

verl calls nothing here and hides any exception of this module. So importing it registers the hooks, which report their
own failures. It does not import verl or torch.
"""

from __future__ import annotations

from verl_ext.integration.hooks import Hook, schedule

_HERE = "verl_ext.integration"

schedule(
    Hook("verl.trainer.ppo.core_algos", f"{_HERE}.advantage:install", "the estimators' names"),
    Hook("verl.utils.config", f"{_HERE}.driver:install", "checks before Ray starts"),
    Hook("verl.trainer.main_ppo", f"{_HERE}.driver:install", "checks before Ray starts, other entry points"),
    Hook("verl.trainer.ppo.v1.trainer_base", f"{_HERE}.default_trainer:install", "the default (V1) trainer"),
    Hook("verl.trainer.ppo.ray_trainer", f"{_HERE}.ray_trainer:install", "RayPPOTrainer"),
    Hook("verl.workers.engine.fsdp.transformer_impl", f"{_HERE}.update.engine:install", "a shorter update"),
    Hook("hydra.core.config_store", "verl_ext.conf:store_presets", "configuration presets"),
)
