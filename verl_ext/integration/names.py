"""The names by which verl finds this package's estimators: those that nobody has registered with verl.

verl's registry stays as it is, so a name that somebody registers, before or after this package, is his.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_ext.integration import hooks
from verl_ext.registry import INSTALLED

CORE = "verl.trainer.ppo.core_algos"


def install(core_algos: ModuleType) -> None:
    """Wrap the function by which verl's trainers find an estimator."""
    hooks.member(core_algos, "ADV_ESTIMATOR_REGISTRY")
    hooks.wrap(core_algos, "get_adv_estimator_fn", wrap_lookup)


def wrap_lookup(original: Callable[..., Any], name_or_enum: Any) -> Any:
    """`get_adv_estimator_fn(name_or_enum)`: return our function for a name of ours."""
    name = str(getattr(name_or_enum, "value", name_or_enum))
    if not is_ours(name):
        return original(name_or_enum)
    from verl_ext.integration.advantage import estimator_function

    return estimator_function(name)


def is_ours(name: str) -> bool:
    """Return whether verl in this process computes with this package by that name."""
    return name in INSTALLED and owner(name) is None


def owner(name: str) -> str | None:
    """Return the module that has registered a name; None without one.

    verl's own `gdpo` does not count, because it cannot run on verl's default trainer.
    """
    function = importlib.import_module(CORE).ADV_ESTIMATOR_REGISTRY.get(name)
    module = getattr(function, "__module__", None)
    return None if (name, module) == ("gdpo", CORE) else module
