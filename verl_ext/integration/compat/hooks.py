"""The points at which this package enters verl, and whether they hold.

A hook runs right after verl's module has been imported. It checks what it is about to touch, then installs; if verl is
not what was expected it says so at once and the estimators refuse to run, while everything else of verl goes on.
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
# As verl's own loggers: its root handler shows warnings only, unless a logger asks for more.
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO").upper())

MARK = "__verl_ext__"


@dataclass
class Hook:
    """One entry point into verl, in this process."""

    module: str
    """verl's module, after whose import the hook runs."""
    target: str
    """`module:function` of this package, called with that module."""
    purpose: str
    does: str = ""
    """What it wraps or adds, for the docs."""
    guard: str | None = None
    """The guard that it belongs to, by its switch; None: it is essential."""
    state: str = "pending"
    """`pending` until the module is imported, then `holds` or `failed`."""
    error: Exception | None = None

    def run(self, module: ModuleType) -> None:
        """Install, remembering how it went."""
        home, name = self.target.split(":")
        try:
            getattr(importlib.import_module(home), name)(module)
        except Exception as error:  # noqa: BLE001 - verl's import must not break; the estimators raise it instead
            self.state, self.error = "failed", error
            if self.guard is None:
                report(f"hook into {self.module} ({self.purpose}) does not hold", error)
            else:
                logger.warning("the guard %s is off here: %s: %s", self.guard, self.module, error)
        else:
            self.state, self.error = "holds", None


HOOKS: dict[str, Hook] = {}


def schedule(*hooks: Hook) -> None:
    """Register hooks, once each however often the plugin is loaded."""
    for hook in hooks:
        if hook.module not in HOOKS:
            HOOKS[hook.module] = hook
            after_import(hook.module, hook.run)


def require() -> None:
    """Raise if an essential hook failed: training would go on with something left out."""
    failed = [hook for hook in HOOKS.values() if hook.state == "failed" and hook.guard is None]
    if failed:
        lines = "".join(f"\n  {hook.module} ({hook.purpose}): {hook.error}" for hook in failed)
        raise IntegrationError(
            f"verl_ext is not fully installed into verl, `python -m verl_ext doctor` says more:{lines}"
        ) from failed[0].error


def report(message: str, error: BaseException) -> None:
    """Say a failure twice: in the log, and as a warning for processes whose log is not shown."""
    logger.error("%s: %s", message, error, exc_info=error)
    warnings.warn(f"verl_ext: {message}: {error}", RuntimeWarning, stacklevel=3)


def is_wrapped(function: Any) -> bool:
    """Whether a function is a wrapper of ours; one that only copied its attributes, by `functools.wraps`, is none."""
    return getattr(function, MARK, None) == _identity(function)


def unwrapped(name: str) -> list[str]:
    """Where imported modules of verl hold a function of verl's by this name, from another module, without our wrapper.

    A module that imports a function by name keeps what it got: a wrapper that is put in place later does not reach it.
    """
    found = []
    for module, held in list(sys.modules.items()):
        function = vars(held).get(name) if module.startswith("verl.") and isinstance(held, ModuleType) else None
        if inspect.isfunction(function) and function.__module__ != module and not is_wrapped(function):
            found.append(f"{module}.{name}")
    return sorted(found)


def _identity(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `owner.name` by `make(original)`, once; the original stays as `__wrapped__`."""
    original = getattr(owner, name)
    if is_wrapped(original):
        return
    wrapper = functools.wraps(original)(make(original))
    if inspect.iscoroutinefunction(original) != inspect.iscoroutinefunction(wrapper):
        raise IntegrationError(
            f"{owner.__name__}.{name} became a coroutine function, or is none any more: this verl moved what verl_ext "
            "hooks into"
        )
    setattr(wrapper, MARK, _identity(wrapper))
    setattr(owner, name, wrapper)
