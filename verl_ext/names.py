"""Who computes by an estimator's name in verl: verl's registry stays as it is, and a name in it is its owner's."""

import importlib
from collections.abc import Mapping
from typing import Any

from verl_ext.registry import INSTALLED

CORE = "verl.trainer.ppo.core_algos"


def is_ours(name: str) -> bool:
    """Return whether verl in this process computes with this package by that name."""
    return name in INSTALLED and owner(name) is None


def owner(name: str) -> str | None:
    """Return the module that has registered a name; None without one.

    verl's own `gdpo` does not count, because it cannot run on verl's default trainer.
    """
    function = registered().get(name)
    if function is None or (name == "gdpo" and is_verls(function)):
        return None
    module = getattr(function, "__module__", None)
    if module == CORE and not is_verls(function):  # `functools.wraps` has copied it from verl's function
        module = getattr(function, "__globals__", {}).get("__name__")
    return module or "another package"


def is_anothers(name: str) -> bool:
    """Return whether neither verl nor this package has registered the function of a name in verl."""
    functions = registered()
    return name in functions and not is_verls(functions[name])


def is_verls(function: Any) -> bool:
    """Return whether a function that is registered in verl is verl's own: whether its code is in verl's file.

    Its `__module__` does not say so, because `functools.wraps` copies that of the function that is wrapped.
    """
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == importlib.import_module(CORE).__file__


def registered() -> Mapping[str, Any]:
    """Return verl's estimators by name; none if this verl has no registry, for which the hook has an error."""
    return getattr(importlib.import_module(CORE), "ADV_ESTIMATOR_REGISTRY", {})
