"""Read dataclasses from plain data, checked by the types and limits of their fields."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from verl_ext.errors import ConfigurationError, unknown

LARGEST_WEIGHT = 1e30  # its square times the square of a reward does not overflow
T = TypeVar("T")
_PLAIN = {bool: "True or False", int: "an integer", str: "a string"}
_NOTHING = dataclasses.MISSING


def limited(default: Any, *, low: float | None = None, above: float | None = None, high: float | None = None) -> Any:
    """A dataclass field for a number with limits: at least `low`, more than `above`, at most `high`."""
    return dataclasses.field(default=default, metadata={"low": low, "above": above, "high": high})


def same_as(kind: type[Any], name: str) -> Any:
    """A dataclass field with the default and the limits of another dataclass's field."""
    (field,) = (item for item in dataclasses.fields(kind) if item.name == name)
    return dataclasses.field(default=field.default, metadata=field.metadata)


def number(
    where: str, value: object, *, low: float | None = None, above: float | None = None, high: float | None = None
) -> None:
    """Raise unless the value is a finite number within the limits."""
    exact = _finite(value)
    if exact is None:
        raise ConfigurationError(f"{where} must be a finite number, found {value!r}")
    if low is not None and exact < low:
        raise ConfigurationError(f"{where} must be at least {low:g}, found {exact:g}")
    if above is not None and exact <= above:
        raise ConfigurationError(f"{where} must be above {above:g}, found {exact:g}")
    if high is not None and exact > high:
        raise ConfigurationError(f"{where} must be at most {high:g}, found {exact:g}")


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond float64
        return None


def section(kind: type[T], given: object, where: str) -> T:
    """Read the dataclass of a section from plain data; null means the defaults."""
    read: T = value_of(where, {} if given is None else given, kind)
    return read


def make(kind: type[T], given: Mapping[Any, Any], where: str) -> T:
    """Read a dataclass from plain data; raise for unknown names, wrong types and missing settings.

    >>> @dataclasses.dataclass
    ... class Clip:
    ...     limit: float = limited(2.0, above=0.0)
    >>> make(Clip, {"limit": 3}, "steps[0]")
    Clip(limit=3.0)
    """
    # A class that is not a dataclass has no settings.
    known = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    fields, hints, read = {item.name: item for item in known if item.init}, typing.get_type_hints(kind), {}
    for name, value in _named(given).items():
        if name not in fields:
            raise ConfigurationError(f"{where}: {unknown('setting', name, fields)}")
        read[name] = value_of(f"{where}.{name}", value, hints[name], fields[name].metadata)
    for name, item in fields.items():
        if name not in read and item.default is _NOTHING and item.default_factory is _NOTHING:
            raise ConfigurationError(f"{where} needs the setting {name!r}")
    return kind(**read)


def value_of(where: str, value: Any, kind: Any, limits: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Check one value by its type and limits, and convert it.

    >>> value_of("x", [1, 2], tuple[float, ...])
    (1.0, 2.0)
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return _first_fitting(where, value, [one for one in inner if one is not type(None)], limits)
    if origin is typing.Literal:
        if value not in inner:
            raise ConfigurationError(f"{where}: {unknown('value', value, inner)}")
        return value
    if kind is float:
        number(where, value, **limits)
        return float(value)
    if kind in _PLAIN:
        if type(value) is not kind:
            whole = kind is int and isinstance(value, float) and value.is_integer()
            remedy = f": write {value:.0f}" if whole else ""
            raise ConfigurationError(f"{where} must be {_PLAIN[kind]}, found {value!r}{remedy}")
        if kind is int:
            number(where, value, **limits)
        return value
    if origin in (tuple, list, Sequence):
        if isinstance(value, str) or not isinstance(value, Sequence):
            remedy = f": write '{where}=[{value}]'" if isinstance(value, str | int | float) else ""
            raise ConfigurationError(f"{where} must be a list, found {value!r}{remedy}")
        values = [value_of(f"{where}[{at}]", item, inner[0], limits) for at, item in enumerate(value)]
        return values if origin is list else tuple(values)
    if origin in (dict, Mapping) or dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ConfigurationError(f"{where} must be a section of settings, found {value!r}")
        if dataclasses.is_dataclass(kind):
            return make(typing.cast(type[Any], kind), value, where)
        return {key: value_of(f"{where}.{key}", item, inner[1], limits) for key, item in _named(value).items()}
    raise ConfigurationError(
        f"{where} is declared as {kind}, which cannot be read from a configuration: declare it as bool, int, float, "
        "str, Literal, `X | None`, tuple[X, ...], Mapping[str, X] or a dataclass"
    )


def _named(given: Mapping[Any, Any]) -> dict[str, Any]:
    """The mapping with strings as keys. YAML 1.1 reads the key `on` as True."""
    return {"on" if key is True else str(key): value for key, value in given.items()}


def _first_fitting(where: str, value: Any, kinds: Sequence[Any], limits: Mapping[str, Any]) -> Any:
    errors = []
    for kind in kinds:
        try:
            return value_of(where, value, kind, limits)
        except ConfigurationError as error:
            errors.append(str(error))
    raise ConfigurationError("; or ".join(errors))
