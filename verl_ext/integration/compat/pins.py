"""A pin: the name and signature of something in verl that this package calls or wraps."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Pin:
    """Something that a module must have, and its expected properties."""

    name: str
    """Its dotted name within the module."""
    takes: tuple[str, ...] | None = None
    """Its first parameters, in this order; any others must have defaults."""
    accepts: tuple[str, ...] = ()
    """Parameters that it must have, at any position."""
    has: tuple[str, ...] = ()
    """Fields (of a dataclass or a pydantic model) or attributes that it must have."""
    kind: type | None = None
    """Its type."""
    own: bool = False
    """Whether this module must define it itself, so that it is not inherited from another one."""
    coroutine: bool | None = None
    """Whether it is a coroutine function."""
    guard: str | None = None
    """The switch of the guard that needs it; None: it is essential."""


def check(where: str, module: Any, pin: Pin) -> Iterator[str]:
    """One message for each property that differs from the pin; `where` is the module's name."""
    path = f"{where}.{pin.name}"
    value = module
    for name in pin.name.split("."):
        if not hasattr(value, name):
            yield f"{path} does not exist any more"
            return
        value = getattr(value, name)
    if pin.kind is not None and not isinstance(value, pin.kind):
        yield f"{path} is a {type(value).__name__}, expected a {pin.kind.__name__}"
    home = str(getattr(value, "__module__", None))
    if pin.own and not path.startswith(f"{home}."):
        yield f"{path} is {home}.{getattr(value, '__qualname__', pin.name)}, expected its own"
    yield from _parameters(path, value, pin)
    fields = {item.name for item in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    fields |= set(getattr(value, "model_fields", ()))
    if missing := [name for name in pin.has if name not in fields and not hasattr(value, name)]:
        yield f"{path} has no {', '.join(missing)} any more"
    is_one = inspect.iscoroutinefunction(value) or inspect.isasyncgenfunction(value)
    if pin.coroutine is not None and is_one != pin.coroutine:
        yield f"{path} {'became a coroutine function' if is_one else 'is not a coroutine function any more'}"


def _parameters(path: str, function: Any, pin: Pin) -> Iterator[str]:
    if pin.takes is None and not pin.accepts:
        return
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        yield f"{path} is not a function any more"
        return
    names = [p.name for p in parameters]
    named = [p for p in parameters if p.kind not in _VARIADIC]
    first = [p.name for p in named]
    needed = {p.name for p in named if p.default is inspect.Parameter.empty}
    if pin.takes is not None and (first[: len(pin.takes)] != list(pin.takes) or needed - set(pin.takes)):
        yield f"{path} takes ({', '.join(first)}), expected ({', '.join(pin.takes)})"
    if missing := [name for name in pin.accepts if name not in names]:
        yield f"{path} does not take {', '.join(missing)} any more; it takes ({', '.join(names)})"
