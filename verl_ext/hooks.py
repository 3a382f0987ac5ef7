"""Change verl: call a function after the import of a module of verl, and wrap functions and classes of that module.

verl imports its plugins in every process. The plugin itself must not import modules of verl, because verl's
`core_algos` alone takes 0.4 s. Instead, verl_ext waits until the process imports such a module, which costs
microseconds. If the installed verl lacks something that a hook needs, the hook logs an error, and the runs that need
the hook raise. The rest of verl works as before.
"""

import functools
import importlib
import importlib.machinery
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

from verl_ext.errors import IntegrationError

logger = logging.getLogger("verl_ext")
# Like verl's own loggers: the root handler shows only warnings unless a logger sets its level.
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO").upper())

TESTED = ("0.9.0", "0.9.1")
"""The releases of verl that verl_ext is tested with. The first one is the oldest release that has plugins."""
MARK = "__verl_ext__"
"""The attribute of a wrapper that `wrap` has made. It has two entries: the wrapper, and the function `around`."""
TRAINERS = {True: "verl.trainer.ppo.v1.trainer_base", False: "verl.trainer.ppo.ray_trainer"}
"""The module of the trainer that verl's entry point starts, by `trainer.use_v1`."""


class _AfterImport(MetaPathFinder):
    """A finder that calls functions after the import of some modules.

    When a module is imported for the first time, Python asks the finders in `sys.meta_path` one after the other for the
    module's spec, which says where the module is. The `loader` of the spec then executes the module. This finder stands
    first in the list. It lets the other finders find the module, and changes the loader that they return, so that the
    loader also calls the functions that wait for the module.
    """

    def __init__(self) -> None:
        self.callbacks: dict[str, list[Callable[[ModuleType], None]]] = {}
        """The functions to call, by the name of the module that they wait for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module with waiting functions. For other modules, None lets Python ask the next finder.

        A reload of the module comes here again.
        """
        if fullname not in self.callbacks:
            return None
        spec = self._spec_of_other_finders(fullname, path, target)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            self._call_after_loading(spec.loader, self.callbacks[fullname])
        return spec

    def _spec_of_other_finders(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the first spec that another finder knows."""
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None

    @staticmethod
    def _call_after_loading(loader: Loader, callbacks: list[Callable[[ModuleType], None]]) -> None:
        """Change a loader so that it calls the callbacks after it has executed the module."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for callback in callbacks:  # a callback may append another one
                callback(module)

        # Set on the instance, so that the loader keeps its type. Python makes one loader per module.
        loader.exec_module = exec_module  # type: ignore[method-assign]


_finder = _AfterImport()


def after_import(module_name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback(module)` after the module's import, now if it is imported already, and after each reload."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.callbacks.setdefault(module_name, []).append(callback)
    module = sys.modules.get(module_name)
    if module is not None and not _is_being_imported(module):
        callback(module)


def _is_being_imported(module: ModuleType) -> bool:
    """Return whether Python still executes the code of a module.

    Python adds a module to `sys.modules` before it executes the code, so functions that a callback wraps may be
    missing. Until the code ends, the attribute `_initializing` of the module's spec is True. After that, the changed
    loader calls the callback.

    Edge case: if the import began before the first callback of the module was registered, its loader is not changed.
    The callback is then not called, and a hook stays pending.
    """
    spec = getattr(module, "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


@dataclass
class Hook:
    """A hook into a module of verl, in this process."""

    module: str
    """The hook runs after the import of this module."""
    target: str
    """`module:function` of verl_ext, which is called with that module."""
    purpose: str
    state: str = "pending"
    """`pending` until the module is imported, then `holds` or `failed`."""
    error: Exception | None = None

    def run(self, module: ModuleType) -> None:
        """Call the target and store the outcome."""
        try:
            target = resolve(self.target)
            target(module)
        except Exception as error:
            self.state, self.error = "failed", error
            message = f"The hook into {self.module} ({self.purpose}) failed: {error}"
            logger.error("%s", message, exc_info=error)
            # verl does not show the log of some processes.
            warnings.warn(f"verl_ext: {message}", RuntimeWarning, stacklevel=2)
        else:
            self.state, self.error = "holds", None


HOOKS: list[Hook] = []
"""The hooks of this process."""


def resolve(target: str) -> Callable[..., Any]:
    """Return the function that `module:function` names."""
    home, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(home), name)
    return function


def schedule(*hooks: Hook) -> None:
    """Register hooks. A hook that is registered already is skipped, so the plugin may be loaded again."""
    for hook in hooks:
        registered = [(known.module, known.target) for known in HOOKS]
        if (hook.module, hook.target) not in registered:
            HOOKS.append(hook)
            after_import(hook.module, hook.run)


def require(*modules: str) -> None:
    """Raise if a hook into one of these modules failed, because verl_ext would be incomplete. Default: any module."""
    failed = [hook for hook in HOOKS if hook.state == "failed"]
    if modules:
        failed = [hook for hook in failed if hook.module in modules]
    if not failed:
        return
    lines = [f"\n  {hook.module} ({hook.purpose}): {hook.error}" for hook in failed]
    raise IntegrationError(
        "verl_ext is not fully active in this process, because hooks into verl failed. Run "
        f"`python -m verl_ext doctor` in the same environment for details.{''.join(lines)}"
    ) from failed[0].error


def require_hooked(module: str) -> None:
    """Import a module. Raise if it cannot be imported, or if a hook into it failed."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise IntegrationError(f"{module} cannot be imported ({error}). {versions()}") from error
    require(module)


@contextmanager
def temporarily(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute of a module or a class another value within a block.

    >>> import math
    >>> with temporarily(math, "pi", 3):
    ...     math.pi
    3
    >>> math.pi > 3
    True
    """
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def member(owner: Any, name: str) -> Any:
    """Return `owner.name`. If the installed verl has no such name, raise an error with the tested versions."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise IntegrationError(f"{dotted_name(owner)} has no {name}, which verl_ext needs. {versions()}") from error


def versions() -> str:
    """Return sentences about the installed and the tested versions of verl, for a message."""
    installed = getattr(sys.modules.get("verl"), "__version__", "of unknown version")
    fix = "Install a tested version of verl."
    if installed in TESTED:
        fix = "Check whether another plugin in this environment changes verl."
    return f"verl {installed} is installed, and verl_ext is tested with {' and '.join(TESTED)}. {fix}"


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace `owner.name` with a wrapper, which calls `around(original, ...)` with its own arguments.

    Raise unless the first parameters of the original are the parameters of `around` after its first.

    Wrapping twice with the same `around` has no effect.
    """
    original = member(owner, name)
    if _is_wrapped_with(original, around):
        return
    require_parameters(owner, name, _positional(around)[1:])

    @functools.wraps(original)  # keeps the original as `__wrapped__`
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, MARK, (wrapper, around))
    replace(owner, name, wrapper)


def _is_wrapped_with(function: Any, around: Callable[..., Any]) -> bool:
    """Return whether `wrap` has made a function, and with this `around`.

    The mark names the wrapper itself, because `functools.wraps` copies attributes. If another plugin wraps the wrapper,
    its function has a copy of the mark, but need not call the wrapper. The mark of such a function names another
    function, so it is wrapped again.
    """
    marked_function, marked_around = getattr(function, MARK, (None, None))
    return marked_function is function and marked_around is around


def replace(owner: Any, name: str, new: Any) -> None:
    """Replace `owner.name` with `new`, also in modules of the same package that have imported the name."""
    old = member(owner, name)
    setattr(owner, name, new)
    if not isinstance(owner, ModuleType):
        return
    package = owner.__name__.partition(".")[0]
    for path, module in list(sys.modules.items()):
        if not path.startswith(f"{package}."):
            continue
        names = getattr(module, "__dict__", {})  # an entry of sys.modules may be None
        if names.get(name) is old:
            setattr(module, name, new)


def require_parameters(owner: Any, name: str, expected: Sequence[str]) -> None:
    """Raise unless the first parameters of `owner.name` have these names, or it takes any positional parameters."""
    function = member(owner, name)
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    names = _positional(function)
    first_names = names[: len(expected)]
    if takes_any or first_names == list(expected):
        return
    listed_names = ", ".join(names) or "none"
    raise IntegrationError(
        f"{dotted_name(owner)}.{name} has the parameters {listed_names}, but verl_ext expects {', '.join(expected)}. "
        f"{versions()}"
    )


def _positional(function: Any) -> list[str]:
    """Return the names of the parameters that a call may pass by position or by name."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]


def dotted_name(owner: Any) -> str:
    """Return the dotted name of a module or a class, and for any other object the dotted name of its class."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    cls = owner if isinstance(owner, type) else type(owner)
    return f"{cls.__module__}.{cls.__qualname__}"
