"""The base of the integration: run a function after a module of verl was imported, and wrap what that module has.

verl imports its plugins in every process, so the plugin itself imports nothing of verl: verl's `core_algos` takes
0.4 s, a finder on `sys.meta_path` some microseconds. If this verl lacks what a hook needs, the hook logs an error and
the estimators raise; the rest of verl works as before.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from verl_ext.errors import IntegrationError

if TYPE_CHECKING:
    from verl_ext.errors import Complaint

logger = logging.getLogger("verl_ext")
# Like verl's own loggers: the root handler shows only warnings unless a logger sets its level.
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO").upper())

TESTED = ("0.9.0", "0.9.1")
"""The releases of verl that this package is tested with; the first is the oldest one that has plugins."""
MARK = "__verl_ext__"
"""The attribute by which a function of ours is known: a wrapper, or an estimator in verl's registry."""
RULES: list[Callable[[Any], Iterable[Complaint]]] = []
"""Rules about a run's configuration that other plugins add; `check` and the start of a run judge by them."""

Around = Callable[..., Any]
"""What is called in the place of a function of verl, with that function before its arguments."""


class _AfterImport(MetaPathFinder):
    """A finder that asks the next finders and wraps the loader they return."""

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.callbacks:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                for callback in self.callbacks.get(fullname, ()):
                    callback(module)

            # Set on the instance, so that the loader keeps its type; importlib makes one loader per module.
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _AfterImport()


def after_import(module_name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback(module)` after the module's import, now if it is imported already, and after each reload."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.callbacks.setdefault(module_name, []).append(callback)
    module = sys.modules.get(module_name)
    # A module that is being imported at this moment has `_initializing`; its loader will run the callback.
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        callback(module)


@dataclass
class Hook:
    """One entry point into verl, in this process."""

    module: str
    """The hook runs after the import of this module."""
    target: str
    """`module:function` of this package, called with that module."""
    purpose: str
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
            message = f"hook into {self.module} ({self.purpose}) failed: {error}"
            logger.error("%s", message, exc_info=error)
            # The log of some processes is not shown.
            warnings.warn(f"verl_ext: {message}", RuntimeWarning, stacklevel=2)
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
    """Raise if a hook failed: training would go on without a part of this package."""
    if failed := [hook for hook in HOOKS.values() if hook.state == "failed"]:
        lines = "".join(f"\n  {hook.module} ({hook.purpose}): {hook.error}" for hook in failed)
        raise IntegrationError(
            f"verl_ext is not fully installed into verl, run `python -m verl_ext doctor` for details:{lines}"
        ) from failed[0].error


def member(owner: Any, name: str) -> Any:
    """Return `owner.name`; if this verl has no such name, raise an error with the installed and the tested versions."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise IntegrationError(f"{_path(owner)} has no {name}; {versions()}") from error


def versions() -> str:
    """Return the installed and the tested versions of verl, for a message."""
    installed = getattr(sys.modules.get("verl"), "__version__", "?")
    return f"verl {installed} is installed, verl_ext is tested with {' and '.join(TESTED)}"


def wrap(owner: Any, name: str, around: Around, *, takes: Sequence[str] | None = None) -> None:
    """Replace `owner.name` by `around(original, ...)` unless that is done; the original is kept as `__wrapped__`.

    Raise unless the original's first parameters are those that it `takes`: by default those that `around` has after
    `original`.
    """
    original = member(owner, name)
    if is_wrapped(original):
        return
    own = inspect.signature(around).parameters.values()
    expected = [item.name for item in own if item.kind is item.POSITIONAL_OR_KEYWORD][1:] if takes is None else takes
    parameters = list(inspect.signature(original).parameters)
    if parameters[: len(expected)] != list(expected):
        raise IntegrationError(
            f"{_path(owner)}.{name} takes {', '.join(parameters)}, expected {', '.join(expected)}; {versions()}"
        )

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    async def wait(*args: Any, **kwargs: Any) -> Any:  # Ray asks whether a method of an actor is a coroutine
        return await around(original, *args, **kwargs)

    wrapper = functools.wraps(original)(wait if inspect.iscoroutinefunction(original) else call)
    setattr(wrapper, MARK, wrapper)
    setattr(owner, name, wrapper)


def adopt(cls: type, wrappers: Mapping[str, Around]) -> None:
    """Wrap the methods of a trainer class now, and those that a subclass overrides when it is defined.

    So a subclass keeps our part even if it does not call `super`; verl's experimental trainers do not, not even in
    `__init__`. The class must take `config` first, and its methods what the wrappers take; a subclass may take others.
    """
    owner: Any = cls
    previous: Any = vars(cls).get("__init_subclass__")

    def __init_subclass__(sub: Any, **kwargs: Any) -> None:
        (super(owner, sub).__init_subclass__ if previous is None else previous.__get__(None, sub))(**kwargs)
        for name in wrappers.keys() & vars(sub).keys():
            wrap(sub, name, wrappers[name], takes=())

    for name, around in wrappers.items():
        wrap(cls, name, around, takes=("self", "config") if name == "__init__" else None)
    if not getattr(getattr(previous, "__func__", None), MARK, False):
        setattr(__init_subclass__, MARK, True)
        cls.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment, arg-type]


def is_wrapped(function: Any) -> bool:
    """Return whether a function is our wrapper, and not one that copied its attributes by `functools.wraps`."""
    return getattr(function, MARK, None) is function


def unwrapped(name: str) -> list[str]:
    """Return the imported modules of verl that hold the function by this name without our wrapper.

    A module that imported the function before it was wrapped still has the original, and so has the module that
    defines it, if the wrapper is in another one.
    """
    held = {
        path: vars(module)[name]
        for path, module in list(sys.modules.items())
        if path.startswith("verl.") and isinstance(module, ModuleType) and inspect.isfunction(vars(module).get(name))
    }
    originals = {function.__wrapped__ for function in held.values() if is_wrapped(function)}
    return sorted(
        f"{path}.{name}"
        for path, function in held.items()
        if not is_wrapped(function) and (function in originals or function.__module__ != path)
    )


def _path(owner: Any) -> str:
    kind = owner if isinstance(owner, ModuleType | type) else type(owner)
    return kind.__name__ if isinstance(kind, ModuleType) else f"{kind.__module__}.{kind.__qualname__}"
