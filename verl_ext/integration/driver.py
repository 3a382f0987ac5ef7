"""The driver's entry into our checks, before Ray starts; loaded in every process, so it imports them on first use."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_ext.integration import hooks


def install(config_module: ModuleType) -> None:
    """Wrap `validate_config`, which verl's entry points call in the driver before Ray starts."""
    hooks.expect_parameters(config_module.validate_config, "config", "use_reference_policy", "use_critic")
    hooks.wrap(config_module, "validate_config", wrap_validate_config)


def wrap_validate_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """`validate_config(config, ...)` after our own checks."""

    def validate_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        from verl_ext.integration.checks import check_run

        check_run(config, unregistered=True)
        return original(config, *args, **kwargs)

    return validate_config
