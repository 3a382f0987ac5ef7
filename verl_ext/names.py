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
    module = getattr(function, "__module__", None) or "another package"
    return None if function is None or (name, module) == ("gdpo", CORE) else module


def registered() -> Mapping[str, Any]:
    """Return verl's estimators by name; none if this verl has no registry, for which the hook has an error."""
    return getattr(importlib.import_module(CORE), "ADV_ESTIMATOR_REGISTRY", {})
