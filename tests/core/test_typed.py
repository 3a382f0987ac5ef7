"""Settings of a step read from plain data, by the types of its fields."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import pytest

from tests.facts import facts, says
from verl_ext.core.typed import limited, make, number, same_as, section, shared, value_of
from verl_ext.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Inner:
    on: str
    least: float = limited(0.0, low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    more: Mapping[str, Inner] = dataclasses.field(default_factory=dict)
    made: int = dataclasses.field(default=3, init=False)


GOOD = [
    (bool, True, True),
    (int, 3, 3),
    (str, "x", "x"),
    (float, 3, 3.0),
    (float, -0.5, -0.5),
    (Any, {1: object}, {1: object}),
    (Literal["a", "b"], "b", "b"),
    (float | None, None, None),
    (float | None, 2, 2.0),
    (int | str, "x", "x"),
    (tuple[float, ...], [1, 2], (1.0, 2.0)),
    (tuple[str, ...], (), ()),
    (list[int], (1, 2), [1, 2]),
    (Sequence[int], [1], (1,)),
    (Mapping[str, float], {1: 2}, {"1": 2.0}),
    (dict[str, int], {}, {}),
    (MappingProxyType[str, int], {"a": 1}, MappingProxyType({"a": 1})),
    (Inner, {"on": "x"}, Inner("x", 0.0)),
    (Mapping[str, Inner], {"a": {True: "x", "least": 1}}, {"a": Inner("x", 1.0)}),  # YAML 1.1 reads `on` as True
]


@pytest.mark.parametrize(("kind", "found", "value"), GOOD)
def test_a_value_is_read_as_its_type_says(kind, found, value):
    read = value_of("x", found, kind)
    assert read == value
    assert type(read) is type(value)


BAD = [
    (bool, 1, ("x", "True", "False", 1)),
    (int, True, ("x", "integer", True)),
    (int, 1.0, ("x", "integer", 1.0)),
    (str, 1, ("x", "string", 1)),
    (float, "1", ("x", "number", "'1'")),
    (float, math.inf, ("x", "finite", math.inf)),
    (float, None, ("x", "number", None)),
    (Literal["a", "b"], "c", ("x", "'c'", "'a'", "'b'")),
    (float | None, "1", ("x", "number", "'1'")),
    (int | str, 1.5, ("x", "integer", "string", 1.5)),
    (int | str, None, ("x", "integer", "string", None)),
    (tuple[float, ...], "12", ("x", "list", "'12'", "x=[12]")),
    (tuple[float, ...], 12, ("x", "list", "found 12", "x=[12]")),
    (tuple[float, ...], [1, "2"], ("x[1]", "number", "'2'")),
    (Mapping[str, float], [1], ("x", "section", "[1]")),
    (Mapping[str, float], {"a": "b"}, ("x.a", "number", "'b'")),
    (Inner, "y", ("x", "section", "'y'")),
    (Inner, {}, ("x", "needs", "'on'")),
    (Inner, {"on": "a", "leest": 1}, ("x", "'leest'", "did you mean 'least'", "'least', 'on'")),
    (Inner, {"on": "a", "least": 2}, ("x.least", "at most 1", 2)),
    (Outer, {"inner": {"on": "a"}, "made": 4}, ("x", "unknown", "'made'")),
    (Outer, {"inner": {"on": "a"}, True: 4}, ("x", "unknown", "'True'")),  # it has no setting `on`
    (Outer, {"inner": {"on": 3}}, ("x.inner.on", "string", 3)),
    (complex, 1, ("x", "complex", "bool, int")),
    (set[int], {1}, ("x", "set[int]", "bool, int")),
]


@pytest.mark.parametrize(("kind", "found", "told"), BAD)
def test_what_is_not_of_its_type_is_refused(kind, found, told):
    with pytest.raises(ConfigurationError, match=facts(*told)):
        value_of("x", found, kind)


def test_limits_hold_for_whole_numbers_and_for_each_of_a_list():
    limits = {"low": 1, "above": None, "high": 3}
    assert value_of("x", 3, int, limits) == 3
    for kind, found, told in (
        (int, 4, ("x", "at most 3", 4)),
        (float, 0, ("x", "at least 1", 0)),
        (tuple[int, ...], [1, 4], ("x[1]", "at most 3", 4)),
        (int | None, 0, ("x", "at least 1", 0)),
    ):
        with pytest.raises(ConfigurationError, match=facts(*told)):
            value_of("x", found, kind, limits)


def test_a_class_without_fields_has_no_settings():
    class Plain:
        pass

    assert isinstance(make(Plain, {}, "x"), Plain)
    with pytest.raises(ConfigurationError, match=facts("x", "unknown", "'a'")):
        make(Plain, {"a": 1}, "x")


def test_defaults_stay_where_nothing_is_given():
    assert make(Outer, {"inner": {"on": "a"}}, "x") == Outer(Inner("a"))


@pytest.mark.parametrize(
    ("limits", "within", "beyond", "valid"),
    [
        ({"low": 1}, 1, 1 - 1e-9, "at least 1"),
        ({"above": 1}, 1 + 1e-9, 1, "above 1"),
        ({"high": 1}, 1, 1 + 1e-9, "at most 1"),
        ({}, -1e300, math.nan, "finite"),
        ({}, 0, 10**400, "finite"),
        ({}, 1, True, "finite"),
    ],
)
def test_numbers_have_limits(limits, within, beyond, valid):
    number("x", within, **limits)
    found = repr(beyond) if valid == "finite" else f"{beyond:g}"
    with pytest.raises(ConfigurationError, match=facts("x", valid, found)):
        number("x", beyond, **limits)


def test_a_section_is_a_mapping_of_known_names():
    assert section(Inner, {"on": "a"}, "x") == Inner("a")
    assert section(dict, None, "x") == {}  # nothing given: all defaults
    with pytest.raises(ConfigurationError, match=facts("x", "section", 3)):
        section(Inner, 3, "x")
    with pytest.raises(ConfigurationError, match=facts("x", "unknown", "'of'")):
        section(Inner, {"of": 1}, "x")


@dataclasses.dataclass(frozen=True)
class Copy:
    least: float = same_as(Inner, "least")
    other: int = 1
    renamed: ClassVar[Mapping[str, str]] = {"lest": "least"}


def test_a_field_may_take_its_default_and_its_limits_from_another():
    assert Copy().least == Inner("a").least
    with pytest.raises(ConfigurationError, match=facts("x.least", "at most 1", 2)):
        make(Copy, {"least": 2}, "x")
    assert shared(Copy(0.5), Inner) == {"least": 0.5}


def test_an_old_name_of_a_setting_ends_in_an_error_with_the_new_line():
    with pytest.raises(ConfigurationError, match=facts("'lest'", "least=0.5")):
        make(Copy, {"lest": 0.5}, "x")


@pytest.mark.parametrize(
    ("value", "advised"), [(10.0, True), (1e20, True), (10.5, False), ("10", False), (True, False)]
)
def test_a_whole_number_written_as_a_float_is_told_how_to_write_it(value, advised):
    with pytest.raises(ConfigurationError, match=facts("x.n", repr(value))) as caught:
        value_of("x.n", value, int)
    assert says(caught.value, f"write {value:.0f}" if advised else "write") is advised


def test_a_float_where_text_belongs_is_not_told_to_be_another_number():
    with pytest.raises(ConfigurationError, match=facts("x.name", 10.0)) as caught:
        value_of("x.name", 10.0, str)
    assert not says(caught.value, "write")
