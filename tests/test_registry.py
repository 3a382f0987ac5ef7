"""Methods by name: those of the package and those of other packages."""

from dataclasses import MISSING, dataclass
from importlib.metadata import EntryPoint

import pytest

from tests.facts import facts
from verl_ext import Batch, Center, Method, Settings, WeightedSum, bounded, build
from verl_ext.conf import preset
from verl_ext.core.cross_reward import DropConflicts
from verl_ext.errors import ConfigurationError
from verl_ext.methods import METHODS
from verl_ext.methods.gdpo import GDPO, GdpoSettings
from verl_ext.registry import (
    ADDED_ESTIMATORS,
    ENTRY_POINT_GROUP,
    ESTIMATORS,
    RESERVED_NAMES,
    changed_sections,
    load,
    possible_bases,
    sections,
)

CENTERED = Method.from_steps("a test", "centers the sum", (WeightedSum(), Center()))


def entry_point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, ENTRY_POINT_GROUP)


def test_every_method_is_registered_with_a_paper_and_a_summary():
    assert dict(ESTIMATORS).items() >= dict(METHODS).items()
    assert set(ADDED_ESTIMATORS) == ESTIMATORS.keys() - {"grpo"}
    assert set(RESERVED_NAMES) == {"gae", *METHODS}
    for name, method in METHODS.items():
        assert load(name) is method
        assert method.paper
        assert 3 < len(method.summary.split()) <= 25


@pytest.fixture
def other_package(tmp_path, monkeypatch):
    """A package with a valid method, an object that is not a method, and a module that cannot be imported."""
    (tmp_path / "other_methods.py").write_text("from tests.test_registry import CENTERED\nNUMBER = 3\n")
    (tmp_path / "other_broken.py").write_text("raise RuntimeError('on purpose')\n")
    monkeypatch.syspath_prepend(tmp_path)
    targets = {
        "centered": "other_methods:CENTERED",
        "number": "other_methods:NUMBER",
        "module": "other_methods",
        "misspelled": "other_methods:CENTERD",
        "broken": "other_broken:CENTERED",
        "missing": "no_such_package:CENTERED",
    }
    for name, value in targets.items():
        monkeypatch.setitem(ESTIMATORS, name, entry_point(name, value))


def test_entry_point_registers_the_method_of_another_package(other_package):
    chain = build("centered", Settings())
    batch = Batch.of([[1], [0]], ["g", "g"])
    assert load("centered") is CENTERED
    assert chain(batch).advantages.tolist() == [0.5, -0.5]
    assert "centered" in possible_bases()
    assert preset("centered")["algorithm"]["adv_estimator"] == "centered"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("number", ("other_methods:NUMBER", "type int instead of Method")),
        ("module", ("other_methods", "type module instead of Method")),
        ("misspelled", ("other_methods:CENTERD", "AttributeError")),
        ("broken", ("other_broken:CENTERED", "RuntimeError: on purpose")),
        ("missing", ("no_such_package:CENTERED", "ModuleNotFoundError", "'no_such_package'")),
    ],
)
def test_method_that_cannot_be_loaded_is_an_error_only_if_it_is_used(name, words, other_package):
    assert {"gdpo", "hadw", "rewards"} < set(sections())
    assert name not in possible_bases()
    assert build("gdpo", Settings.parse({"gdpo": {"whiten": "token"}})).steps
    problem = (f"estimator {name!r}", "cannot be loaded", *words)
    fix = ("Install its package again", "`verl_ext.Method`", "package.module:OBJECT", "verl_ext.estimators")
    with pytest.raises(ConfigurationError, match=facts(*problem, *fix)):
        build(name, Settings())


@pytest.fixture
def method_without_settings(monkeypatch):
    """Register `centered`."""
    monkeypatch.setitem(ESTIMATORS, "centered", CENTERED)


def test_method_without_settings_rejects_a_setting(method_without_settings):
    with pytest.raises(ConfigurationError, match=facts("algorithm.centered", "'limit'", "no settings", "Remove")):
        changed_sections(Settings.parse({"centered": {"limit": 1}}))


def test_method_without_settings_accepts_an_empty_section(method_without_settings):
    assert changed_sections(Settings.parse({"centered": None})) == {}
    assert changed_sections(Settings.parse({"centered": {}})) == {}
    assert "centered" not in sections()


@dataclass(frozen=True, kw_only=True)
class InheritingSettings(GdpoSettings):
    """The settings of gdpo, and a setting without a default."""

    rate: float = bounded(MISSING, above=0.0)
    """Factor of the advantages."""


@pytest.fixture
def inheriting(monkeypatch):
    """A method whose settings inherit from those of gdpo."""
    method = Method("a test", "gdpo with another setting", GDPO.build, InheritingSettings)
    monkeypatch.setitem(ESTIMATORS, "inheriting", method)


def test_inheriting_settings_do_not_change_the_inherited_section(inheriting):
    settings = Settings.parse({"inheriting": {"whiten": "token", "rate": 1}})
    assert build("gdpo", settings) == build("gdpo", Settings())
    whitened = build("gdpo", Settings.parse({"gdpo": {"whiten": "token"}}))
    assert build("inheriting", settings) == whitened


def test_setting_without_a_default_must_be_set(inheriting):
    for algorithm in ({}, {"inheriting": {}}):
        with pytest.raises(ConfigurationError, match=facts("algorithm.inheriting", "'rate'")):
            build("inheriting", Settings.parse(algorithm))
    assert build("inheriting", Settings.parse({"inheriting": {"rate": 0.5}})).steps
    assert "inheriting" not in preset("hadw")["algorithm"]  # it would need the setting


def test_norm_adv_by_std_in_grpo_removes_scale_by_std_from_fgrpo():
    without_std = build("fgrpo", Settings.parse({"norm_adv_by_std_in_grpo": False}))
    assert [step.name for step in without_std.steps] == ["weighted_sum", "center", "weight_by_focal"]


@pytest.mark.parametrize("value", [0, False, "", []])
def test_value_instead_of_a_section_is_rejected(value):
    with pytest.raises(ConfigurationError, match=facts("algorithm.liteppo", "no settings")):
        changed_sections(Settings.parse({"liteppo": value}))


def test_method_with_steps_in_an_invalid_order_is_rejected(monkeypatch):
    steps = (WeightedSum(), Center(), DropConflicts())
    monkeypatch.setitem(ESTIMATORS, "late", Method.from_steps("a test", "drops conflicts behind the sum", steps))
    with pytest.raises(ConfigurationError, match=facts("'late'", "drop_conflicts", "before the sum")):
        build("late", Settings())
