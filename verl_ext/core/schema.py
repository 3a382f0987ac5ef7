"""Read dataclasses from plain data, checked by the types and limits of their fields."""

import dataclasses
import operator
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

from verl_ext.errors import ConfigurationError, unknown

LARGEST_WEIGHT = 1e30  # its square times the square of a reward does not overflow
T = TypeVar("T")

# For each limit of a number: its name, the words of a message, and when a number satisfies it.
_LIMITS = (("low", "at least", operator.ge), ("above", "above", operator.gt), ("high", "at most", operator.le))


def bounded(
    default: Any,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    only_with: Mapping[str, tuple[Any, ...]] | None = None,
) -> Any:
    """Declare a dataclass field for a number with limits: at least `low`, above `above`, at most `high`.

    `only_with` maps another field to the values with which this field has an effect. Setting it otherwise is an error.

    The type of a field may be bool, int, float, str, `Literal`, `X | None`, `tuple[X, ...]`, `Mapping[str, X]` or a
    dataclass. A value of another type, or beyond the limits, is an error before training. The limits of a tuple hold
    for each entry.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Settings:
    ...     mode: typing.Literal["hard", "soft"] = "hard"
    ...     width: float = bounded(0.1, above=0.0, high=1.0, only_with={"mode": ("soft",)})
    >>> parse_dataclass(Settings, {"mode": "soft", "width": 0.5}, "steps[0]")
    Settings(mode='soft', width=0.5)
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
    section = _as_section(where, {} if given is None else given)
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, kind))}
    types_of_fields = typing.get_type_hints(kind)
    values = {}
    for name, value in section.items():
        if name not in fields:
            raise ConfigurationError(f"{where}: {unknown('setting', name, fields)}.")
        field = fields[name]
        if value is None and field.default is dataclasses.MISSING:
            continue  # a preset shows what must be set as null
        values[name] = parse_value(f"{where}.{name}", value, types_of_fields[name], field.metadata)
    _check_required(where, fields, values)
    settings = kind(**values)
    _check_effect(where, fields, values, settings)
    return settings


def _check_required(where: str, fields: Mapping[str, dataclasses.Field[Any]], values: Mapping[str, Any]) -> None:
    """Raise for a field that has neither a value nor a default."""
    for name, field in fields.items():
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if name not in values and not has_default:
            raise ConfigurationError(
                f"{where} needs the setting {name!r}, which has no default. Set {where}.{name} to a value."
            )


def _check_effect(
    where: str, fields: Mapping[str, dataclasses.Field[Any]], values: Mapping[str, Any], settings: object
) -> None:
    """Raise for a value that differs from its default, but has no effect with the value of another field."""
    for name, field in fields.items():
        if name not in values or values[name] == field.default:
            continue
        for other, effective_values in field.metadata.get("only_with", {}).items():
            other_value = getattr(settings, other)
            if other_value not in effective_values:
                remedy = " or ".join(f"{other}={value}" for value in effective_values)
                raise ConfigurationError(
                    f"{where}.{name}={values[name]} has no effect with {where}.{other}={other_value}. Remove {name}, "
                    f"or set {remedy}."
                )


def parse_value(where: str, value: Any, kind: Any, limits: Mapping[str, Any] | None = None) -> Any:
    """Check one value by its type and limits, and convert it.

    >>> parse_value("x", [1, 2], tuple[float, ...])
    (1.0, 2.0)
    """
    origin = typing.get_origin(kind)  # for example tuple, if the type is tuple[float, ...]
    arguments = typing.get_args(kind)  # for example (float, ...)
    limits = limits or {}
    if kind is Any:
        return value
    if kind is bool:
        return _parse_bool(where, value)
    if kind is int:
        return _parse_int(where, value, limits)
    if kind is float:
        return _parse_float(where, value, limits)
    if kind is str:
        return _parse_string(where, value)
    if origin is typing.Literal:
        return _parse_literal(where, value, arguments)
    if origin in (typing.Union, types.UnionType) and arguments[1:] == (type(None),):
        return None if value is None else parse_value(where, value, arguments[0], limits)
    if origin is tuple:
        return _parse_tuple(where, value, arguments, limits)
    if origin is Mapping:
        return _parse_mapping(where, value, arguments)
    if dataclasses.is_dataclass(kind):
        return parse_dataclass(typing.cast(type[Any], kind), value, where)
    raise ConfigurationError(
        f"{where} is declared as {kind}, which cannot be read from a configuration. Use bool, int, float, str, "
        "Literal, `X | None`, tuple[X, ...], Mapping[str, X] or a dataclass as its type."
    )


def _parse_bool(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong_type(where, value, "True or False")
    return value


def _parse_int(where: str, value: object, limits: Mapping[str, Any]) -> int:
    if isinstance(value, float) and value.is_integer():
        raise ConfigurationError(f"{where} must be an integer, found {value!r}. Set {where}={value:.0f}.")
    if type(value) is not int:  # isinstance would accept True
        raise _wrong_type(where, value, "an integer")
    _check_number(where, value, limits)
    return value


def _parse_float(where: str, value: Any, limits: Mapping[str, Any]) -> float:
    _check_number(where, value, limits)
    return float(value)


def _parse_string(where: str, value: object) -> str:
    if type(value) is not str:
        raise _wrong_type(where, value, "a string")
    if not value:
        raise ConfigurationError(f"{where} is empty. Set {where} to a value, or remove it.")
    return value


def _wrong_type(where: str, value: object, expected: str) -> ConfigurationError:
    return ConfigurationError(f"{where} must be {expected}, found {value!r}. Set {where} to {expected}.")


def _parse_literal(where: str, value: Any, valid: tuple[Any, ...]) -> Any:
    if value not in valid:
        raise ConfigurationError(f"{where}: {unknown('value', value, valid)}.")
    return value


def _parse_tuple(where: str, value: object, arguments: tuple[Any, ...], limits: Mapping[str, Any]) -> tuple[Any, ...]:
    """Read each entry as the first of the type's arguments. The limits hold for each entry."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        example = value if isinstance(value, str | int | float) else "..."
        raise ConfigurationError(f"{where} must be a list, found {value!r}. Set '{where}=[{example}]'.")
    entries = []
    for index, entry in enumerate(value):
        entries.append(parse_value(f"{where}[{index}]", entry, arguments[0], limits))
    return tuple(entries)


def _parse_mapping(where: str, value: object, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Read each entry as the second of the type's arguments."""
    section = _as_section(where, value)
    return {name: parse_value(f"{where}.{name}", entry, arguments[1]) for name, entry in section.items()}


def _as_section(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(
            f"{where} must be a section of settings, found {value!r}. Set its entries as {where}.<setting>=<value>."
        )
    return value


def _check_number(where: str, value: object, limits: Mapping[str, Any]) -> None:
    """Raise unless the value is a finite number within the limits."""
    if not _is_finite(value):
        raise ConfigurationError(f"{where} must be a finite number, found {value!r}. Set {where} to a finite number.")
    valid_range = []
    within = True
    for name, words, satisfies in _LIMITS:
        limit = limits.get(name)
        if limit is not None:
            valid_range.append(f"{words} {limit:g}")
            within = within and satisfies(value, limit)
    if not within:
        raise ConfigurationError(
            f"{where} must be {' and '.join(valid_range)}, found {value:g}. Set {where} to a number in this range."
        )


def _is_finite(value: object) -> TypeGuard[int | float]:
    """Return whether a value is an integer or a float that is finite as a float. A bool is no number here."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max
