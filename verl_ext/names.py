"""Find out which package computes an estimator in verl.

verl_ext does not change verl's registry: an estimator that another package registers there takes precedence.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from verl_ext.registry import ADDED_ESTIMATORS

CORE = "verl.trainer.ppo.core_algos"


def computed_by_verl_ext(name: str) -> bool:
    """Return whether verl_ext computes the estimator of this name in this process."""
    return name in ADDED_ESTIMATORS and owner(name) is None


def owner(name: str) -> str | None:
    """Return the module that has registered an estimator with verl, or None.

    verl's own `gdpo` is ignored, because it cannot run on verl's default trainer.
    """
    function = registered().get(name)
    if function is None or (name == "gdpo" and is_verl_function(function)):
        return None
    module = getattr(function, "__module__", None)
    if module == CORE and not is_verl_function(function):  # `functools.wraps` has copied it from verl's function
        module = getattr(function, "__globals__", {}).get("__name__")
    return module or "another package"


def registered_by_other_package(name: str) -> bool:
    """Return whether another package than verl has registered an estimator of this name with verl."""
    functions = registered()
    return name in functions and not is_verl_function(functions[name])


def is_verl_function(function: Any) -> bool:
    """Return whether the code of a registered function is in verl's file.

    Its `__module__` may be wrong, because `functools.wraps` copies the module of the wrapped function.
    """
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == importlib.import_module(CORE).__file__


def registered() -> Mapping[str, Any]:
    """Return verl's estimators by name; empty if this verl has no registry, which the hook reports as an error."""
    return getattr(importlib.import_module(CORE), "ADV_ESTIMATOR_REGISTRY", {})
