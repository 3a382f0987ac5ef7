"""The plugin: verl imports this module in every process, through the `verl.plugins` entry point.

verl calls nothing here and hides any exception of this module. So importing it registers the hooks, and it reports its
own failures. It does not import verl or torch.
"""

from __future__ import annotations

from verl_ext.errors import IntegrationError
from verl_ext.estimators import ESTIMATORS
from verl_ext.integration.hooks import Hook, after_import, schedule

_HERE = "verl_ext.integration"

broken: Exception | None = None
"""The error that kept this package from being set up in this process, if any."""


def hooks_into_verl() -> tuple[Hook, ...]:
    """Return the hooks, each with the module of verl after whose import it runs; the docs print this table."""
    return (
        Hook(
            "verl.trainer.ppo.core_algos",
            f"{_HERE}.advantage:install",
            "the estimators' names",
            "registers the estimators in `ADV_ESTIMATOR_REGISTRY`; `gdpo` replaces verl's own, which is kept beside it",
        ),
        Hook(
            "verl.utils.config",
            f"{_HERE}.driver:install",
            "checks before Ray starts",
            "wraps `validate_config`: the checks of a run's configuration come first",
        ),
        Hook(
            "verl.trainer.main_ppo",
            f"{_HERE}.driver:install_entry",
            "checks before Ray starts, experimental trainers",
            "wraps `run_ppo`, which the experimental entry points call, in the same way",
        ),
        Hook(
            "verl.trainer.ppo.v1.trainer_base",
            f"{_HERE}.default_trainer:install",
            "the default (V1) trainer",
            "wraps `PPOTrainer.__init__`, `_compute_advantage`, `_update_actor`, `_save_checkpoint` and "
            "`_load_checkpoint`; with `algorithm.filter_groups.metric=any_reward` also `_dapo_filtered_keys` of its "
            "replay buffer",
        ),
        Hook(
            "verl.trainer.ppo.ray_trainer",
            f"{_HERE}.ray_trainer:install",
            "RayPPOTrainer and the experimental trainers",
            "wraps `compute_advantage`, `compute_data_metrics`, and `RayPPOTrainer.__init__`, `_update_actor`, "
            "`_save_checkpoint` and `_load_checkpoint`",
        ),
        Hook(
            "verl.experimental.fully_async_policy.fully_async_trainer",
            f"{_HERE}.ray_trainer:install_fully_async",
            "checkpoints of the fully asynchronous trainer",
            "wraps `FullyAsyncTrainer.load_checkpoint`",
        ),
        Hook(
            "verl.workers.engine.fsdp.transformer_impl",
            f"{_HERE}.skip:install",
            "the actor's update",
            "wraps `prepare_micro_batches` and `FSDPEngine.forward_backward_batch`; they are verl's own without "
            "`algorithm.verl_ext.skip_zero_advantage`",
        ),
        Hook(
            "hydra.core.config_store",
            "verl_ext.conf:install",
            "configuration presets",
            "stores the presets in Hydra's ConfigStore",
        ),
    )


def _report_broken(error: Exception) -> None:
    """Log, warn, and register estimators that raise the error: verl itself logs it only at debug level."""
    import logging
    import warnings

    global broken
    broken = error
    message = f"verl_ext is installed but cannot work: {type(error).__name__}: {error}"
    logging.getLogger("verl_ext").error(message, exc_info=error)
    warnings.warn(message, RuntimeWarning, stacklevel=2)

    def raise_cause(*_args: object, **_kwargs: object) -> None:
        raise IntegrationError(f"{message}; run `python -m verl_ext doctor` for details") from error

    after_import(
        "verl.trainer.ppo.core_algos",
        lambda module: module.ADV_ESTIMATOR_REGISTRY.update(dict.fromkeys(ESTIMATORS, raise_cause)),
    )


try:
    schedule(*hooks_into_verl())
except Exception as error:  # noqa: BLE001 - report any failure, and let verl go on
    _report_broken(error)
