"""The plugin: verl imports this module in every process, through the `verl.plugins` entry point.

verl calls no function of this module and hides its exceptions. So importing it registers the hooks, which report their
own failures. It does not import verl or torch. A run that needs a subpackage which is not registered here raises.
"""

from verl_ext.hooks import RULES, TRAINERS, Hook, schedule

DEFAULT, RAY = TRAINERS[True], TRAINERS[False]

schedule(
    Hook("verl.trainer.ppo.core_algos", "verl_ext.advantages.estimator:install", "names of the estimators"),
    Hook(DEFAULT, "verl_ext.trainers.default_trainer:install", "estimators in the default (V1) trainer"),
    Hook(RAY, "verl_ext.trainers.ray_trainer:install", "estimators in RayPPOTrainer"),
    Hook(DEFAULT, "verl_ext.update:over_trainers", "faster update in the default trainer"),
    Hook(RAY, "verl_ext.update:over_trainers", "faster update in RayPPOTrainer"),
    # After the others, so that a trainer's configuration is checked before they read it.
    Hook(DEFAULT, "verl_ext.checks.start:over_trainers", "checks in the default trainer"),
    Hook(RAY, "verl_ext.checks.start:over_trainers", "checks in RayPPOTrainer"),
    Hook("verl.utils.config", "verl_ext.checks.start:over_driver", "checks before Ray starts"),
    Hook("verl.trainer.main_ppo", "verl_ext.checks.start:over_driver", "checks before Ray starts in other programs"),
    Hook("hydra.core.config_store", "verl_ext.conf:store_presets", "configuration presets"),
)
RULES["verl_ext.update.rule:rule"] = False
