"""Run our checks in the driver, before Ray starts. Every process loads this module, so it imports the checks lazily."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_ext.estimators import ESTIMATORS
from verl_ext.integration.compat import contract, hooks


def install(config_module: ModuleType) -> None:
    """Wrap `validate_config`, which verl's entry points call in the driver before Ray starts."""
    contract.require("verl.utils.config", config_module)
    hooks.wrap(config_module, "validate_config", wrap_checked)


def wrap_checked(original: Callable[..., Any]) -> Callable[..., Any]:
    """`validate_config(config, ...)` or another function of the configuration, preceded by our checks."""

    def checked(config: Any, *args: Any, **kwargs: Any) -> Any:
        from verl_ext.integration.config.checks import check_run
        from verl_ext.integration.config.read import estimator_name, settings_in_force
        from verl_ext.integration.guards import guard, nodes, run_lock

        check_run(config, unregistered=True)
        settings = settings_in_force(config)
        for folder, use in run_lock.folders(config, settings):
            guard.attempt("lock_folders", settings.verl_ext, run_lock.require_free, folder, use)
        if estimator_name(config) in ESTIMATORS:
            guard.attempt("check_nodes", settings.verl_ext, nodes.check_when_ray_runs, settings.verl_ext)
        return original(config, *args, **kwargs)

    return checked


def install_entry(main_ppo: ModuleType) -> None:
    """Wrap `run_ppo`, which the experimental entry points import; the fully asynchronous one calls nothing else.

    `python -m verl.trainer.main_ppo` runs as `__main__`, which this does not wrap; that calls `validate_config`.
    """
    contract.require("verl.trainer.main_ppo", main_ppo)
    hooks.wrap(main_ppo, "run_ppo", wrap_checked)
