"""Check that the methods of a subclass call the methods of verl_ext that they override.

Python calls such methods overriding methods; Hydra's overrides have nothing to do with this file. The code of a method
decides. If it contains the name of the overridden method, it counts as a call. The code of functions that a decorator
or a closure holds is read as well.
"""

import functools
import logging
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from verl_ext.errors import IntegrationError
from verl_ext.hooks import dotted_name

logger = logging.getLogger("verl_ext")


def require_passed_on(cls: type, mixin: type, names: Iterable[str]) -> None:
    """Raise if a class before the mixin overrides one of these methods and does not use the name of the method.

    Log a warning if the code of a method cannot be read.
    """
    before_mixin = cls.__mro__[: cls.__mro__.index(mixin)]
    for base in before_mixin:
        for name in names:
            if name in vars(base):
                _require_call_of_overridden(base, name)


def _require_call_of_overridden(cls: type, name: str) -> None:
    """Raise if the code of a method does not use the method's own name. Warn if its code cannot be read."""
    functions = _functions_in(vars(cls)[name])
    if not functions:
        logger.warning(
            "%s.%s is not a Python function, so verl_ext cannot check that it calls the method that it "
            "overrides. If it does not, verl_ext's code in that method is skipped. Add a call of super().%s.",
            *(dotted_name(cls), name, name),
        )
    elif not any(_mentions(function.__code__, name) for function in functions):
        raise IntegrationError(
            f"{dotted_name(cls)}.{name} does not call the method that it overrides, so verl_ext's code in that "
            f"method would be skipped. Add a call of super().{name}."
        )


def _functions_in(method: Any) -> list[FunctionType]:
    """Return the Python functions of a method: the method itself, and functions in its decorators or partial object."""
    functions: list[FunctionType] = []
    seen: dict[int, Any] = {}  # by id, and with the object, so that no other object gets the same id
    waiting = [method]
    while waiting:
        item = waiting.pop()
        # `callable` is False for these two descriptors, which Python calls through the class.
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
        yield item.func
        yield from item.args
        yield from item.keywords.values()
    elif isinstance(item, MethodType):
        yield item.__func__
        yield item.__self__
    elif isinstance(item, classmethod | staticmethod):
        yield item.__func__
    elif isinstance(item, FunctionType):
        for cell in item.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue


def _mentions(code: CodeType, name: str) -> bool:
    """Return whether a function, or a function in it, uses a name: as an attribute, or as text for `getattr`."""
    if name in code.co_names or name in code.co_consts:
        return True
    inner_functions = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return any(_mentions(inner, name) for inner in inner_functions)
