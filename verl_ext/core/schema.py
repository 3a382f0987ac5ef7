"""Read dataclasses from plain data, checked by the types and limits of their fields."""

import dataclasses
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from verl_ext.errors import ConfigurationError, unknown

LARGEST_WEIGHT = 1e30  # its square times the square of a reward does not overflow
T = TypeVar("T")
_PLAIN = {bool: "True or False", int: "an integer", str: "a string"}


def bounded(
    default: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    only_with: Mapping[str, tuple[Any, ...]] | None = None,
) -> Any:
    """Declare a dataclass field for a number with limits: at least `low`, above `above`, at most `high`.

    `only_with` maps another field to the values with which this field has an effect.
    """
    limits = {"low": low, "above": above, "high": high}
    return dataclasses.field(default=default, metadata={**limits, "only_with": only_with or {}})


def parse_dataclass(kind: type[T], given: object, where: str) -> T:
    """Read a dataclass from a mapping, or its defaults from None.

    Raise for unknown names, wrong types, missing settings, and settings without effect.

    >>> @dataclasses.dataclass
    ... class Clip:
    ...     limit: float = bounded(2.0, above=0.0)
    >>> parse_dataclass(Clip, {"limit": 3}, "steps[0]")
    Clip(limit=3.0)
    """
    given = _mapping(where, {} if given is None else given)
    fields = {item.name: item for item in dataclasses.fields(typing.cast(Any, kind))}
    hints, read = typing.get_type_hints(kind), {}
    for name, value in given.items():
        if name not in fields:
            raise ConfigurationError(f"{where}: {unknown('setting', name, fields)}.")
        if value is None and fields[name].default is dataclasses.MISSING:
            continue  # a preset shows what must be set as null
        read[name] = parse_value(f"{where}.{name}", value, hints[name], fields[name].metadata)
    for name, item in fields.items():
        if name not in read and item.default is item.default_factory is dataclasses.MISSING:
            raise ConfigurationError(
                f"{where} needs the setting {name!r}, which has no default. Set {where}.{name} to a value."
            )
    made = kind(**read)
    for name, item in fields.items():
        for other, valid in item.metadata.get("only_with", {}).items():
            if read.get(name, item.default) != item.default and getattr(made, other) not in valid:
                raise ConfigurationError(
                    f"{where}.{name}={read[name]} has no effect with {where}.{other}={getattr(made, other)}. Remove "
                    f"{name}, or set {' or '.join(f'{other}={value}' for value in valid)}."
                )
    return made


def parse_value(where: str, value: Any, kind: Any, limits: Mapping[str, Any] | None = None) -> Any:
    """Check one value by its type and limits, and convert it.

    >>> parse_value("x", [1, 2], tuple[float, ...])
    (1.0, 2.0)
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType) and inner[1:] == (type(None),):
        return None if value is None else parse_value(where, value, inner[0], limits)
    if origin is typing.Literal:
        if value not in inner:
            raise ConfigurationError(f"{where}: {unknown('value', value, inner)}.")
        return value
    if kind is float:
        _check_number(where, value, limits or {})
        return float(value)
    if kind in _PLAIN:
        if type(value) is not kind:
            whole = kind is int and isinstance(value, float) and value.is_integer()
            remedy = f"={value:.0f}" if whole else f" to {_PLAIN[kind]}"
            raise ConfigurationError(f"{where} must be {_PLAIN[kind]}, found {value!r}. Set {where}{remedy}.")
        if kind is int:
            _check_number(where, value, limits or {})
        if value == "":
            raise ConfigurationError(f"{where} is empty. Set {where} to a value, or remove it.")
        return value
    if origin is tuple:
        if isinstance(value, str) or not isinstance(value, Sequence):
            entry = value if isinstance(value, str | int | float) else "..."
            raise ConfigurationError(f"{where} must be a list, found {value!r}. Set '{where}=[{entry}]'.")
        return tuple(parse_value(f"{where}[{index}]", item, inner[0], limits) for index, item in enumerate(value))
    if origin is Mapping:
        return {key: parse_value(f"{where}.{key}", item, inner[1]) for key, item in _mapping(where, value).items()}
    if dataclasses.is_dataclass(kind):
        return parse_dataclass(typing.cast(type[Any], kind), value, where)
    raise ConfigurationError(
        f"{where} is declared as {kind}, which cannot be read from a configuration. Use bool, int, float, str, "
        "Literal, `X | None`, tuple[X, ...], Mapping[str, X] or a dataclass as its type."
    )


def _mapping(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{where} must be a section of settings, found {value!r}. Set its entries as {where}.<setting>=<value>."
        )
    return value


def _check_number(where: str, value: object, limits: Mapping[str, Any]) -> None:
    """Raise unless the value is a finite number within the limits."""
    low, above, high = (limits.get(name) for name in ("low", "above", "high"))
    if isinstance(value, bool) or not (isinstance(value, int | float) and abs(value) <= sys.float_info.max):
        raise ConfigurationError(f"{where} must be a finite number, found {value!r}. Set {where} to a finite number.")
    too_low = (low is not None and value < low) or (above is not None and value <= above)
    if too_low or (high is not None and value > high):
        words = {"at least": low, "above": above, "at most": high}
        valid = " and ".join(f"{word} {limit:g}" for word, limit in words.items() if limit is not None)
        raise ConfigurationError(f"{where} must be {valid}, found {value:g}. Set {where} to a number in this range.")
