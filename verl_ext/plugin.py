"""The plugin: verl imports this module in every process, through the `verl.plugins` entry point.

verl calls nothing here and hides any exception of this module. So importing it registers the hooks, which report their
own failures. It does not import verl or torch. A run that needs a room which is not registered here raises.
"""

from verl_ext.hooks import RULES, TRAINERS, Hook, schedule

DEFAULT, RAY = TRAINERS[True], TRAINERS[False]

schedule(
    Hook("verl.trainer.ppo.core_algos", "verl_ext.integration.advantage:install", "the estimators' names"),
    Hook(DEFAULT, "verl_ext.integration.default_trainer:install", "the default (V1) trainer"),
    Hook(RAY, "verl_ext.integration.ray_trainer:install", "RayPPOTrainer"),
    Hook(DEFAULT, "verl_ext.update:over_trainers", "a shorter update, the default trainer"),
    Hook(RAY, "verl_ext.update:over_trainers", "a shorter update, RayPPOTrainer"),
    # After the others, so that a trainer's configuration is checked before they read it.
    Hook(DEFAULT, "verl_ext.checks.start:over_trainers", "checks of the default trainer"),
    Hook(RAY, "verl_ext.checks.start:over_trainers", "checks of RayPPOTrainer"),
    Hook("verl.utils.config", "verl_ext.checks.start:over_driver", "checks before Ray starts"),
    Hook("verl.trainer.main_ppo", "verl_ext.checks.start:over_driver", "checks before Ray starts, other entry points"),
    Hook("hydra.core.config_store", "verl_ext.conf:store_presets", "configuration presets"),
)
RULES["verl_ext.update.rule:rule"] = False
