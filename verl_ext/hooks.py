"""Change verl: call a function after a module of verl was imported, and wrap functions and classes of that module.

verl imports its plugins in every process, so the plugin does not import modules of verl: verl's `core_algos` takes
0.4 s, a finder on `sys.meta_path` some microseconds. If the installed verl lacks something that a hook needs, the hook
logs an error, and the runs that need the hook raise. The rest of verl works as before.
"""

import functools
import importlib
import importlib.machinery
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from verl_ext.errors import IntegrationError

logger = logging.getLogger("verl_ext")
# Like verl's own loggers: the root handler shows only warnings unless a logger sets its level.
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO").upper())

TESTED = ("0.9.0", "0.9.1")
"""The releases of verl that verl_ext is tested with; the first is the oldest release that has plugins."""
OURS = "__verl_ext__"
"""The attribute that marks a wrapper of verl_ext."""
TRAINERS = {True: "verl.trainer.ppo.v1.trainer_base", False: "verl.trainer.ppo.ray_trainer"}
"""The module of the trainer that verl's entry point starts, by `trainer.use_v1`."""
RULES: dict[str, bool] = {}
"""Rules that subpackages and other plugins add: `module:function` of a `Run`, and whether every run is checked.

Otherwise the rule is for runs that use verl_ext, and for `check`."""


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
            resolve(self.target)(module)
        except Exception as error:
            self.state, self.error = "failed", error
            message = f"The hook into {self.module} ({self.purpose}) failed: {error}"
            logger.error("%s", message, exc_info=error)
            # verl does not show the log of some processes.
            warnings.warn(f"verl_ext: {message}", RuntimeWarning, stacklevel=2)
        else:
            self.state, self.error = "holds", None


HOOKS: list[Hook] = []


def resolve(target: str) -> Callable[..., Any]:
    """Return the function that `module:function` names."""
    home, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(home), name)
    return function


def schedule(*hooks: Hook) -> None:
    """Register hooks, each one once even if the plugin is loaded again."""
    for hook in hooks:
        if all((known.module, known.target) != (hook.module, hook.target) for known in HOOKS):
            HOOKS.append(hook)
            after_import(hook.module, hook.run)


def require(*modules: str) -> None:
    """Raise if a hook into one of these modules (default: any module) failed, because verl_ext would be incomplete."""
    if failed := [hook for hook in HOOKS if (not modules or hook.module in modules) and hook.state == "failed"]:
        lines = "".join(f"\n  {hook.module} ({hook.purpose}): {hook.error}" for hook in failed)
        raise IntegrationError(
            "verl_ext is not fully active in this process, because hooks into verl failed. Run "
            f"`python -m verl_ext doctor` in the same environment for details.{lines}"
        ) from failed[0].error


def require_hooked(module: str) -> None:
    """Import a module, and raise unless its hook holds."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise IntegrationError(f"{module} cannot be imported ({error}). {versions()}") from error
    require(module)


def member(owner: Any, name: str) -> Any:
    """Return `owner.name`. If the installed verl has no such name, raise an error with the tested versions."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise IntegrationError(f"{_path(owner)} has no {name}, which verl_ext needs. {versions()}") from error


def versions() -> str:
    """Return sentences about the installed and the tested versions of verl, for a message."""
    installed = getattr(sys.modules.get("verl"), "__version__", "of unknown version")
    fix = "Install a tested version of verl."
    if installed in TESTED:
        fix = "Check whether another plugin in this environment changes verl."
    return f"verl {installed} is installed, and verl_ext is tested with {' and '.join(TESTED)}. {fix}"


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace `owner.name` with `around(original, ...)`, once; the original is kept as `__wrapped__`.

    Raise unless the first parameters of the original are the parameters of `around` after its first.
    """
    original = layer = member(owner, name)
    while (ours := getattr(layer, OURS, None)) and ours[0] is layer:  # another plugin may have copied the attributes
        if ours[1] is around:
            return
        layer = layer.__wrapped__
    require_parameters(owner, name, _positional(around)[1:])

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapper, OURS, (wrapper, around))
    replace(owner, name, wrapper)


def replace(owner: Any, name: str, new: Any) -> None:
    """Replace `owner.name` with `new`, also in modules of the same package that have imported the name."""
    old = member(owner, name)
    setattr(owner, name, new)
    if isinstance(owner, ModuleType):
        package = owner.__name__.partition(".")[0] + "."
        for path, module in list(sys.modules.items()):
            if path.startswith(package) and getattr(module, "__dict__", {}).get(name) is old:
                setattr(module, name, new)


def require_parameters(owner: Any, name: str, expected: Sequence[str]) -> None:
    """Raise unless the first parameters of `owner.name` have these names, or it takes any positional parameters."""
    original = member(owner, name)
    names = _positional(original)
    any_name = any(item.kind is item.VAR_POSITIONAL for item in inspect.signature(original).parameters.values())
    if names[: len(expected)] != list(expected) and not any_name:
        raise IntegrationError(
            f"{_path(owner)}.{name} has the parameters {', '.join(names) or 'none'}, but verl_ext expects "
            f"{', '.join(expected)}. {versions()}"
        )


def _positional(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [item.name for item in parameters if item.kind is item.POSITIONAL_OR_KEYWORD]


def require_passed_on(cls: type, mixin: type, names: Iterable[str]) -> None:
    """Raise if a class before the mixin overrides one of these methods without calling the overridden method.

    Log a warning if the code of a method cannot be read.
    """
    for base in cls.__mro__[: cls.__mro__.index(mixin)]:
        for name in names:
            if name not in vars(base):
                continue
            functions = _functions_in(vars(base)[name])
            if not functions:
                logger.warning(
                    "%s.%s is not a Python function, so verl_ext cannot check that it calls the method that it "
                    "overrides. If it does not, verl_ext's code in that method is skipped. Add a call of super().%s.",
                    *(_path(base), name, name),
                )
            elif not any(_mentions(function.__code__, name) for function in functions):
                raise IntegrationError(
                    f"{_path(base)}.{name} does not call the method that it overrides, so verl_ext's code in that "
                    f"method would be skipped. Add a call of super().{name}."
                )


def _functions_in(method: Any) -> list[FunctionType]:
    """Return the Python functions of a method: the method itself, and functions in its decorators or partial object."""
    functions: list[FunctionType] = []
    seen: dict[int, Any] = {}
    waiting = [method]
    while waiting:
        item = waiting.pop()
        is_method = callable(item) or isinstance(item, functools.partialmethod | classmethod)
        if not is_method or isinstance(item, type) or id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, FunctionType):
            functions.append(item)
        waiting += _held_by(item)
    return functions


def _held_by(item: Any) -> Iterator[Any]:
    """Yield the objects in a callable: its attributes, the variables of its closure, the arguments of a partial."""
    yield from getattr(item, "__dict__", {}).values()  # `__wrapped__` of functools.wraps is one of them
    if isinstance(item, functools.partial | functools.partialmethod):
        yield from (item.func, *item.args, *item.keywords.values())
    elif isinstance(item, MethodType):
        yield from (item.__func__, item.__self__)
    elif isinstance(item, classmethod | staticmethod):
        yield item.__func__
    elif isinstance(item, FunctionType):
        for cell in item.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue


def _mentions(code: CodeType, name: str) -> bool:
    """Return whether a function, or a function that is defined in it, uses the name of an attribute."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return name in code.co_names or any(_mentions(constant, name) for constant in inner)


def _path(owner: Any) -> str:
    kind = owner if isinstance(owner, ModuleType | type) else type(owner)
    return kind.__name__ if isinstance(kind, ModuleType) else f"{kind.__module__}.{kind.__qualname__}"
