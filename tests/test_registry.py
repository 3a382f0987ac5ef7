"""The estimators by name: what one of another package that is broken leaves working."""

from __future__ import annotations

import logging
import sys

import pytest

from tests.facts import facts, says
from verl_ext import Settings, build, estimators, registry
from verl_ext.errors import ConfigurationError
from verl_ext.registry import BUILT_IN, ESTIMATORS
from verl_ext.settings import sections

DECLARED = """
from dataclasses import dataclass
from verl_ext import Centre, Chain, WeighAndSum, estimator

@dataclass
class Own:
    limit: float

@estimator(section=%s)
def broken(settings):
    return Chain((WeighAndSum(), Centre()))
"""
# The source of its module, and what a message must say of it.
BROKEN = {
    "raises as it is imported": ("raise RuntimeError('on purpose')", "RuntimeError: on purpose"),
    "is not there": ("", "AttributeError"),
    "has settings that are no dataclass": (DECLARED % "int", "dataclass"),
    "has a setting without a default": (DECLARED % "Own", "limit"),
    "is no function": ("broken = 5", "5"),
    "has a default that is no plain data": (DECLARED.replace("float", "object = frozenset('a')") % "Own", "frozenset"),
    "has a number of numpy's as default": (
        "from numpy import float64\n" + DECLARED.replace("float", "float = float64(2.5)") % "Own",
        "2.5",
    ),
    "has settings of an unknown type": (DECLARED.replace("float", "'Nothing' = None") % "Own", "Nothing"),
    "names others by what raises": (DECLARED.replace("section=%s", "also=lambda: 1 / 0"), "ZeroDivisionError"),
    "names others by a number": (DECLARED.replace("section=%s", "also=lambda: 5"), "TypeError"),
    "names others by one text": (DECLARED.replace("section=%s", "also=lambda: 'gdpo'"), "gdpo"),
    "has a preset that is no plain data": (DECLARED.replace("section=%s", "preset={'a': frozenset()}"), "frozenset"),
    "has a preset that is none": (DECLARED.replace("section=%s", "preset=5"), "preset=5"),
}
every_kind = pytest.mark.parametrize("kind", BROKEN)


@pytest.fixture
def broken(kind, tmp_path, monkeypatch):
    """An estimator of another package, named `broken_<number>`: a warning is logged once for each."""
    name = f"broken_{list(BROKEN).index(kind)}_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(BROKEN[kind][0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ESTIMATORS, "_known", {**ESTIMATORS, name: f"{name}:broken"})
    yield name
    sys.modules.pop(name, None)


@every_kind
def test_a_broken_one_is_skipped_with_one_warning_that_names_it_and_the_error(broken, kind, caplog):
    with caplog.at_level(logging.WARNING, "verl_ext"):
        assert set(registry.declarations()) == set(BUILT_IN)
        assert {"gdpo", "hadw"} < set(sections()) <= {"rewards", "verl_ext", *BUILT_IN}
    (message,) = (record.getMessage() for record in caplog.records)
    assert says(message, repr(broken), f"{broken}:broken", BROKEN[kind][1])


@every_kind
def test_what_computes_with_it_raises_and_the_others_do_not(broken, kind):
    assert build("gdpo", Settings.parse({"gdpo": {"whiten": "token"}})).steps
    with pytest.raises(ConfigurationError, match=facts(repr(broken))):
        Settings.parse({broken: {"limit": 1}})
    with pytest.raises(ConfigurationError, match=facts(repr(broken), BROKEN[kind][1])):
        build(broken, Settings())


@pytest.mark.parametrize(("body", "told"), [("1 / 0", "ZeroDivisionError"), ("return [1]", "[1]")])
def test_one_that_raises_or_returns_no_chain_is_named(body, told, tmp_path, monkeypatch):
    name = f"wrong_{len(told)}"
    (tmp_path / f"{name}.py").write_text(f"def wrong(settings):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ESTIMATORS, "_known", {**ESTIMATORS, name: f"{name}:wrong"})
    with pytest.raises(ConfigurationError, match=facts(repr(name), told)):
        build(name, Settings())


def test_settings_that_raise_are_named(tmp_path, monkeypatch):
    source = DECLARED.replace(
        "float", "float = 1.0\n    def __post_init__(self):\n        raise TypeError('on purpose')"
    )
    (tmp_path / "raising.py").write_text(source % "Own")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(ESTIMATORS, "_known", {**ESTIMATORS, "raising": "raising:broken"})
    with pytest.raises(ConfigurationError, match=facts("algorithm.raising", "Own", "TypeError: on purpose")):
        Settings.parse({"raising": {"limit": 2.0}})


def test_its_own_refusal_of_the_settings_stays_as_it_is(monkeypatch):
    def refuses(settings):
        raise ConfigurationError("mine.limit must be above 0")

    monkeypatch.setattr(ESTIMATORS, "_known", {**ESTIMATORS, "mine": f"{__name__}:refuses"})
    monkeypatch.setattr(sys.modules[__name__], "refuses", refuses, raising=False)
    with pytest.raises(ConfigurationError) as caught:
        build("mine", Settings())
    assert str(caught.value) == "mine.limit must be above 0"


def test_a_fault_in_one_of_this_package_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(estimators, "load", lambda name: lambda settings: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build("gdpo", Settings())


def test_a_broken_one_of_this_package_is_an_error(monkeypatch):
    monkeypatch.setattr(ESTIMATORS, "_known", {**ESTIMATORS, "gdpo": "no_such_module:gdpo"})
    with pytest.raises(ConfigurationError, match=facts("'gdpo'", "no_such_module:gdpo")):
        registry.declarations()
