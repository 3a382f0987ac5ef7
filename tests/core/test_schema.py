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
    on: str
    least: float = bounded(0.0, low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    more: Mapping[str, Inner] = dataclasses.field(default_factory=dict)


GOOD = [
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
]


@pytest.mark.parametrize(("kind", "given", "value"), GOOD)
def test_a_value_is_read_as_its_type_says(kind, given, value):
    read = parse_value("x", given, kind)
    assert read == value
    assert type(read) is type(value)


BAD = [
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
]


@pytest.mark.parametrize(("kind", "given", "words"), BAD)
def test_what_is_not_of_its_type_is_refused(kind, given, words):
    with pytest.raises(ConfigurationError, match=facts(*words)):
        parse_value("x", given, kind)


@pytest.mark.parametrize(
    ("kind", "limits", "within", "beyond", "valid"),
    [
        (float, {"low": 1}, 1, 1 - 1e-9, "at least 1"),
        (float, {"above": 1}, 1 + 1e-9, 1, "above 1"),
        (float | None, {"high": 1}, 1, 1 + 1e-9, "at most 1"),
        (int, {"low": 1}, 1, 0, "at least 1"),
        (int | None, {"high": 3}, 3, 4, "at most 3"),
        (float, {}, -1e300, math.nan, "finite"),
        (float, {}, 1e300, -math.inf, "finite"),
        (float, {}, 0, 10**400, "finite"),
        (float, {}, 1, True, "finite"),
    ],
)
def test_numbers_have_limits_each_of_a_list_as_well(kind, limits, within, beyond, valid):
    assert parse_value("x", within, kind, limits) == within
    assert parse_value("x", [within], tuple[kind, ...], limits) == (within,)
    shown = repr(beyond) if valid == "finite" else f"{beyond:g}"
    with pytest.raises(ConfigurationError, match=facts("x", valid, shown)):
        parse_value("x", beyond, kind, limits)
    with pytest.raises(ConfigurationError, match=facts("x[0]", valid, shown)):
        parse_value("x", [beyond], tuple[kind, ...], limits)


@pytest.mark.parametrize(("value", "kind", "advised"), [(10.0, int, True), (10.5, int, False), (1.0, str, False)])
def test_for_a_whole_number_written_as_a_float_the_integer_is_proposed(value, kind, advised):
    with pytest.raises(ConfigurationError, match=facts("x.n", repr(value))) as caught:
        parse_value("x.n", value, kind)
    assert says(caught.value, f"x.n={value:.0f}") is advised
