"""Check the configuration in the driver, before Ray starts.

Every process loads this module, so it imports the checks only when it runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_ext.integration import hooks


def install(config_module: ModuleType) -> None:
    """Wrap `validate_config`, which verl's entry points call in the driver before Ray starts."""
    hooks.wrap(config_module, "validate_config", wrap_checked, takes=("config",))


def install_entry(main_ppo: ModuleType) -> None:
    """Wrap `run_ppo`, which the experimental entry points import; the fully asynchronous one calls nothing else.

    `python -m verl.trainer.main_ppo` runs as `__main__`, which this does not wrap; that calls `validate_config`.
    """
    hooks.wrap(main_ppo, "run_ppo", wrap_checked, takes=("config",))


def wrap_checked(original: Callable[..., Any]) -> Callable[..., Any]:
    """`validate_config(config, ...)` or another function of the configuration: our checks come first."""

    def checked(config: Any, *args: Any, **kwargs: Any) -> Any:
        from verl_ext.integration.checks import check_run

        check_run(config)
        return original(config, *args, **kwargs)

    return checked
