"""How a thing of verl's is pinned down: what must be true of it for this package to go on working."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Pin:
    """One thing of a module: that it is there, and what else is relied on."""

    name: str
    """Dotted, from the module; empty for the module itself."""
    takes: tuple[str, ...] | None = None
    """Parameters in this order, first of all; it needs no others."""
    accepts: tuple[str, ...] = ()
    """Parameters that it has, wherever they stand."""
    has: tuple[str, ...] = ()
    """Fields of a dataclass or of a pydantic model, or attributes."""
    says: tuple[str, ...] = ()
    """What its source must contain, as `words` has it."""
    kind: type | None = None
    """What it is an instance of."""
    own: bool = False
    """Whether the module defines it itself, rather than a class that its owner inherits from."""
    coroutine: bool | None = None
    """Whether it is a coroutine function."""
    implemented: str | None = None
    """`module:Class` of ours which has all its abstract methods."""
    served: str | None = None
    """`module:Class` of ours which has all methods that its source calls on a `server`."""


class _UnseenError(Exception):
    """What keeps a pin from being looked at."""


def check(where: str, module: Any, pin: Pin, *, source: bool = True) -> Iterator[str]:
    """What is not as pinned, one message each; `where` is the module's name.

    Without `source` only what can be told without reading the source, and without importing anything of ours.
    """
    path = f"{where}.{pin.name}" if pin.name else where
    found = module
    for name in filter(None, pin.name.split(".")):
        if not hasattr(found, name):
            yield f"{path} is not there any more"
            return
        found = getattr(found, name)
    for test in (_kind, _own, _parameters, _has, _coroutine, *((_says, _implemented, _served) if source else ())):
        try:
            yield from test(path, found, pin)
        except _UnseenError as error:
            yield f"{path} {error}"


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


def _says(path: str, found: Any, pin: Pin) -> Iterator[str]:
    if pin.says:
        said = _words_of(found, f"{', '.join(pin.says)} would be looked for")
        if missing := [word for word in pin.says if word not in said]:
            yield f"{path} does not mention {', '.join(missing)} any more"


def _implemented(path: str, found: Any, pin: Pin) -> Iterator[str]:
    if pin.implemented is not None:
        ours = _of_ours(pin.implemented)
        if not hasattr(found, "__abstractmethods__"):
            raise _UnseenError(f"is no abstract class any more: what {ours.__name__} has to have cannot be told")
        if missing := sorted(found.__abstractmethods__ & getattr(ours, "__abstractmethods__", frozenset())):
            yield f"{path} asks for {', '.join(missing)}, which {ours.__name__} does not have"


def _served(path: str, found: Any, pin: Pin) -> Iterator[str]:
    if pin.served is not None:
        ours = _of_ours(pin.served)
        called = set(re.findall(r"\bserver\.(\w+)\.remote\(", _source(found, "calls of a server would be looked for")))
        if missing := sorted(name for name in called if not hasattr(ours, name)):
            yield f"{path} calls {', '.join(missing)}, which {ours.__name__} does not have"


def _of_ours(target: str) -> Any:
    home, name = target.split(":")
    try:
        return getattr(importlib.import_module(home), name)
    except Exception as error:  # it imports of verl what may be gone; whatever it is, it belongs on the list
        raise _UnseenError(
            f"cannot be held against {home}.{name}, which cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _source(found: Any, what_for: str) -> str:
    try:
        return inspect.getsource(found)
    except (OSError, TypeError) as error:
        raise _UnseenError(f"has no source, in which {what_for}") from error


def _words_of(found: Any, what_for: str) -> set[str]:
    source = _source(found, what_for)
    try:
        return words(source)
    except SyntaxError as error:  # that of a lambda is cut out of its line
        raise _UnseenError(f"has a source that cannot be read, in which {what_for}: {error}") from error


def words(source: str) -> set[str]:
    """Names, attributes, keywords, calls and text constants of a piece of source; no comments.

    >>> sorted(words("self.at = take(data['key'], over=axis)"))
    ['at', 'axis', 'data', 'key', 'over', 'over=axis', 'self', 'take', 'take(']
    >>> sorted(words('f"{a}_{b}"'))
    ['_', 'a', 'b', '{a}_{b}']
    """
    found: set[str] = set()
    # A method is indented. To take that away would break on a text of several lines that goes to the margin.
    for node in ast.walk(ast.parse(f"if True:\n{source}" if source.startswith((" ", "\t")) else source)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
        elif isinstance(node, ast.keyword) and node.arg is not None:
            found |= {node.arg, f"{node.arg}={ast.unparse(node.value)}"}
        elif isinstance(node, ast.Call):
            found.add(f"{ast.unparse(node.func).rpartition('.')[2]}(")
        elif isinstance(node, ast.JoinedStr):
            found.add("".join(_piece(part) for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def _piece(part: ast.expr) -> str:
    return f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else str(ast.literal_eval(part))
