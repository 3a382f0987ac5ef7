"""The plugin: verl imports this module in every process, through the `verl.plugins` entry point.

verl calls nothing here and hides any exception of this module. So importing it registers the hooks, and it reports its
own failures. It does not import verl or torch.
"""

from __future__ import annotations

from verl_ext.errors import IntegrationError
from verl_ext.integration.hooks import Hook, after_import, schedule
from verl_ext.registry import ESTIMATORS

_HERE = "verl_ext.integration"

broken: Exception | None = None
"""The error that kept this package from being set up in this process, if any."""


_HOOKS = (
    Hook("verl.trainer.ppo.core_algos", f"{_HERE}.advantage:install", "the estimators' names"),
    Hook("verl.utils.config", f"{_HERE}.driver:install", "checks before Ray starts"),
    Hook("verl.trainer.main_ppo", f"{_HERE}.driver:install_entry", "checks before Ray starts, experimental trainers"),
    Hook("verl.trainer.ppo.v1.trainer_base", f"{_HERE}.default_trainer:install", "the default (V1) trainer"),
    Hook(
        "verl.trainer.ppo.ray_trainer",
        f"{_HERE}.ray_trainer:install",
        "RayPPOTrainer and the experimental trainers",
    ),
    Hook(
        "verl.experimental.separation.ray_trainer",
        f"{_HERE}.ray_trainer:install_separation",
        "metrics of the experimental trainers",
    ),
    Hook(
        "verl.experimental.fully_async_policy.fully_async_trainer",
        f"{_HERE}.ray_trainer:install_fully_async",
        "checkpoints of the fully asynchronous trainer",
    ),
    Hook("verl.workers.engine.fsdp.transformer_impl", f"{_HERE}.skip:install", "a shorter update"),
    Hook("hydra.core.config_store", "verl_ext.conf:install", "configuration presets"),
)
"""Each hook: the module of verl after whose import it runs, its function, and its purpose."""


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
    schedule(*_HOOKS)
except Exception as error:  # noqa: BLE001 - report any failure, and let verl go on
    _report_broken(error)
