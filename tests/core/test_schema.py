"""Settings of a step read from plain data, by the types of its fields."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from tests.facts import facts, says
from verl_ext.core.schema import bounded, parse_value
from verl_ext.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Inner:
    """A section with a required setting and a bounded one."""

    on: str
    least: float = bounded(0.0, low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True)
class Outer:
    """A section with sections in it."""

    inner: Inner
    more: Mapping[str, Inner] = dataclasses.field(default_factory=dict)


@pytest.mark.parametrize(
    ("kind", "value", "parsed"),
    [
        (bool, True, True),
        (int, 3, 3),
        (str, "x", "x"),
        (float, 3, 3.0),
        (Any, {1: object}, {1: object}),
        (Literal["a", "b"], "b", "b"),
        (float | None, None, None),
        (float | None, 2, 2.0),
        (tuple[float, ...], [1, 2], (1.0, 2.0)),
        (Mapping[str, float], {"a": 2}, {"a": 2.0}),
        (Outer, {"inner": {"on": "a"}}, Outer(Inner("a"))),
        (Mapping[str, Inner], {"a": {"on": "x", "least": 1}}, {"a": Inner("x", 1.0)}),
    ],
    ids=str,
)
def test_a_value_is_parsed_by_its_type(kind, value, parsed):
    result = parse_value("x", value, kind)
    assert result == parsed
    assert type(result) is type(parsed)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (bool, 1, ("x", "True", "False", 1)),
        (int, True, ("x", "integer", True)),
        (str, 1, ("x", "string", 1)),
        (float, "1", ("x", "number", "'1'")),
        (Literal["a", "b"], "c", ("x", "'c'", "'a'", "'b'")),
        (float | None, "1", ("x", "number", "'1'")),
        (tuple[float, ...], "12", ("x", "list", "'12'", "x=[12]")),
        (tuple[float, ...], 12, ("x", "list", "found 12", "x=[12]")),
        (tuple[float, ...], [1, "2"], ("x[1]", "number", "'2'")),
        (Mapping[str, float], [1], ("x", "section", "[1]")),
        (Mapping[str, float], {"a": "b"}, ("x.a", "number", "'b'")),
        (Inner, "y", ("x", "section", "'y'")),
        (Inner, None, ("x", "needs", "'on'")),
        (Inner, {"on": "a", "leest": 1}, ("x", "'leest'", "did you mean 'least'", "'least', 'on'")),
        (Outer, {"inner": {"on": 3}}, ("x.inner.on", "string", 3)),
        (complex, 1, ("x", "complex", "bool, int")),
        (int | str, 1, ("x", "int | str", "bool, int")),
    ],
)
def test_a_value_of_another_type_is_rejected(kind, value, words):
    with pytest.raises(ConfigurationError, match=facts(*words)):
        parse_value("x", value, kind)


@pytest.mark.parametrize(
    ("kind", "limits", "within", "beyond", "words"),
    [
        (float, {"low": 1}, 1, 1 - 1e-9, ("at least 1", "1")),
        (float, {"above": 1}, 1 + 1e-9, 1, ("above 1", "1")),
        (float | None, {"high": 1}, 1, 1 + 1e-9, ("at most 1", "1")),
        (int, {"low": 1}, 1, 0, ("at least 1", "0")),
        (int | None, {"high": 3}, 3, 4, ("at most 3", "4")),
        (float, {}, -1e300, math.nan, ("finite", "nan")),
        (float, {}, 1e300, -math.inf, ("finite", "-inf")),
        pytest.param(float, {}, 0, 10**400, ("finite", repr(10**400)), id="too large for a float"),
        (float, {}, 1, True, ("finite", "True")),
    ],
)
def test_a_number_and_each_number_of_a_list_must_be_within_its_limits(kind, limits, within, beyond, words):
    list_of_kind = tuple[kind, ...]
    assert parse_value("x", within, kind, limits) == within
    assert parse_value("x", [within], list_of_kind, limits) == (within,)
    with pytest.raises(ConfigurationError, match=facts("x", *words)):
        parse_value("x", beyond, kind, limits)
    with pytest.raises(ConfigurationError, match=facts("x[0]", *words)):
        parse_value("x", [beyond], list_of_kind, limits)


@pytest.mark.parametrize(
    ("value", "kind", "proposed", "is_proposed"),
    [(10.0, int, "x.n=10", True), (10.5, int, "x.n=10", False), (1.0, str, "x.n=1", False)],
    ids=["whole number", "fraction", "text"],
)
def test_for_a_whole_number_written_as_a_float_the_integer_is_proposed(value, kind, proposed, is_proposed):
    with pytest.raises(ConfigurationError, match=facts("x.n", repr(value))) as error:
        parse_value("x.n", value, kind)
    assert says(error.value, proposed) is is_proposed
