"""The hooks by which this package enters verl.

A hook runs right after a module of verl has been imported. It checks what it will wrap, then wraps it. If this verl
differs from what the hook expects, the hook logs an error and the estimators raise; the rest of verl works as before.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from verl_ext.errors import IntegrationError
from verl_ext.integration.compat.imports import after_import

logger = logging.getLogger("verl_ext")
# Like verl's own loggers: the root handler shows only warnings unless a logger sets its level.
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO").upper())

MARK = "__verl_ext__"


@dataclass
class Hook:
    """One entry point into verl, in this process."""

    module: str
    """The hook runs after the import of this module."""
    target: str
    """`module:function` of this package, called with that module."""
    purpose: str
    does: str = ""
    """What it wraps or adds, for the docs."""
    guard: str | None = None
    """The switch of the guard it belongs to; None: it is essential."""
    state: str = "pending"
    """`pending` until the module is imported, then `holds` or `failed`."""
    error: Exception | None = None

    def run(self, module: ModuleType) -> None:
        """Call the target and store the outcome."""
        home, name = self.target.split(":")
        try:
            getattr(importlib.import_module(home), name)(module)
        except Exception as error:
            self.state, self.error = "failed", error
            if self.guard is None:
                message = f"hook into {self.module} ({self.purpose}) failed: {error}"
                logger.error("%s", message, exc_info=error)
                # The log of some processes is not shown.
                warnings.warn(f"verl_ext: {message}", RuntimeWarning, stacklevel=2)
            else:
                logger.warning("the guard %s is off here: %s: %s", self.guard, self.module, error)
        else:
            self.state, self.error = "holds", None


HOOKS: dict[str, Hook] = {}


def schedule(*hooks: Hook) -> None:
    """Register hooks, each one once even if the plugin is loaded again."""
    for hook in hooks:
        if hook.module not in HOOKS:
            HOOKS[hook.module] = hook
            after_import(hook.module, hook.run)


def require() -> None:
    """Raise if an essential hook failed: training would go on without a part of this package."""
    failed = [hook for hook in HOOKS.values() if hook.state == "failed" and hook.guard is None]
    if failed:
        lines = "".join(f"\n  {hook.module} ({hook.purpose}): {hook.error}" for hook in failed)
        raise IntegrationError(
            f"verl_ext is not fully installed into verl, run `python -m verl_ext doctor` for details:{lines}"
        ) from failed[0].error


def in_place_of(function: Any) -> str:
    """Which function of verl an estimator replaced, for a message; empty if none."""
    replaced = getattr(function, "replaced", None)
    return "" if replaced is None else f", in place of {replaced.__module__}.{replaced.__qualname__}"


def is_wrapped(function: Any) -> bool:
    """Whether a function is our wrapper; False for one that copied its attributes by `functools.wraps`."""
    return getattr(function, MARK, None) == _identity(function)


def unwrapped(name: str) -> list[str]:
    """The imported modules of verl that hold the function by this name without our wrapper.

    A module that imported the function before it was wrapped still has the original, and so has the module that
    defines it, if the wrapper is in another one.
    """
    held = {
        module: vars(found)[name]
        for module, found in list(sys.modules.items())
        if module.startswith("verl.") and isinstance(found, ModuleType) and inspect.isfunction(vars(found).get(name))
    }
    originals = {function.__wrapped__ for function in held.values() if is_wrapped(function)}
    return sorted(
        f"{module}.{name}"
        for module, function in held.items()
        if not is_wrapped(function) and (function in originals or function.__module__ != module)
    )


def _identity(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `owner.name` by `make(original)` unless that is done; the original is kept as `__wrapped__`."""
    original = getattr(owner, name)
    if is_wrapped(original):
        return
    wrapper = functools.wraps(original)(make(original))
    if inspect.iscoroutinefunction(original) != inspect.iscoroutinefunction(wrapper):
        raise IntegrationError(
            f"{owner.__name__}.{name} became a coroutine function or no longer is one: this version of verl changed "
            "what verl_ext hooks into"
        )
    setattr(wrapper, MARK, _identity(wrapper))
    setattr(owner, name, wrapper)
