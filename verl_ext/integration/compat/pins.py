"""A pin: the name and the signature of one thing of verl's that this package calls or wraps."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Pin:
    """One thing of a module: that it is there, and what else is relied on."""

    name: str
    """Dotted, from the module."""
    takes: tuple[str, ...] | None = None
    """Parameters in this order, first of all; it needs no others."""
    accepts: tuple[str, ...] = ()
    """Parameters that it has, wherever they stand."""
    has: tuple[str, ...] = ()
    """Fields of a dataclass or of a pydantic model, or attributes."""
    kind: type | None = None
    """What it is an instance of."""
    own: bool = False
    """Whether the module defines it itself, rather than a class that its owner inherits from."""
    coroutine: bool | None = None
    """Whether it is a coroutine function."""
    guard: str | None = None
    """The guard that needs it, by its switch; None: it is essential."""


def check(where: str, module: Any, pin: Pin) -> Iterator[str]:
    """What is not as pinned, one message each; `where` is the module's name."""
    path = f"{where}.{pin.name}"
    found = module
    for name in pin.name.split("."):
        if not hasattr(found, name):
            yield f"{path} is not there any more"
            return
        found = getattr(found, name)
    for test in (_kind, _own, _parameters, _has, _coroutine):
        yield from test(path, found, pin)


def _parameters(path: str, function: Any, pin: Pin) -> Iterator[str]:
    if pin.takes is None and not pin.accepts:
        return
    try:
        given = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        yield f"{path} is no function any more"
        return
    found = [parameter.name for parameter in given if parameter.kind not in _VARIADIC]
    needed = [p.name for p in given if p.default is inspect.Parameter.empty and p.kind not in _VARIADIC]
    if pin.takes is not None and (found[: len(pin.takes)] != list(pin.takes) or set(needed) - set(pin.takes)):
        yield f"{path} takes ({', '.join(found)}), expected ({', '.join(pin.takes)})"
    if missing := [name for name in pin.accepts if name not in {parameter.name for parameter in given}]:
        yield f"{path} does not take {', '.join(missing)} any more, but ({', '.join(p.name for p in given)})"


def _kind(path: str, found: Any, pin: Pin) -> Iterator[str]:
    if pin.kind is not None and not isinstance(found, pin.kind):
        yield f"{path} is a {type(found).__name__}, expected a {pin.kind.__name__}"


def _own(path: str, found: Any, pin: Pin) -> Iterator[str]:
    home = str(getattr(found, "__module__", None))
    if pin.own and not path.startswith(f"{home}."):
        yield f"{path} is {home}.{getattr(found, '__qualname__', pin.name)}, expected its own"


def _has(path: str, found: Any, pin: Pin) -> Iterator[str]:
    fields = {item.name for item in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else set()
    fields |= set(getattr(found, "model_fields", ()))
    if missing := [name for name in pin.has if name not in fields and not hasattr(found, name)]:
        yield f"{path} has no {', '.join(missing)} any more"


def _coroutine(path: str, found: Any, pin: Pin) -> Iterator[str]:
    is_one = inspect.iscoroutinefunction(found) or inspect.isasyncgenfunction(found)
    if pin.coroutine is not None and is_one != pin.coroutine:
        yield f"{path} {'became' if is_one else 'is not'} a coroutine function{'' if is_one else ' any more'}"
