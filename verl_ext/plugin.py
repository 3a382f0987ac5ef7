"""The plugin: verl imports this module in every process, through the `verl.plugins` entry point.

verl calls no function of this module and hides its exceptions. So importing it registers the hooks, which report their
own failures. A run that needs a failed hook raises. This module does not import verl or torch.
"""

from verl_ext.hooks import TRAINERS, Hook, schedule

schedule(
    Hook("verl.trainer.ppo.core_algos", "verl_ext.advantages.estimator:install", "names of the estimators"),
    Hook(TRAINERS[True], "verl_ext.trainers.default_trainer:install", "verl_ext in the default (V1) trainer"),
    Hook(TRAINERS[False], "verl_ext.trainers.ray_trainer:install", "verl_ext in RayPPOTrainer"),
    Hook("verl.utils.config", "verl_ext.checks.start:install", "checks before Ray starts"),
    Hook("verl.trainer.main_ppo", "verl_ext.checks.start:install", "checks before Ray starts in other programs"),
    Hook("hydra.core.config_store", "verl_ext.conf:store_presets", "configuration presets"),
)
