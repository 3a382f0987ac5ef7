"""The estimators by name, and those of other packages."""

import sys

import pytest

from tests.facts import facts
from verl_ext import Settings, build
from verl_ext.conf import preset
from verl_ext.errors import ConfigurationError
from verl_ext.registry import ESTIMATORS, changed, sections


@pytest.mark.parametrize(("source", "words"), [("raise RuntimeError('on purpose')", "on purpose"), ("", "'broken'")])
def test_one_that_cannot_be_loaded_is_an_error_for_its_own_run_only(source, words, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    monkeypatch.setitem(ESTIMATORS, "broken", "broken")
    assert {"gdpo", "hadw", "rewards"} < set(sections())
    assert build("gdpo", Settings.parse({"gdpo": {"whiten": "token"}})).steps
    with pytest.raises(ConfigurationError, match=facts(words)):
        build("broken", Settings())


def test_an_estimator_without_settings_takes_none(tmp_path, monkeypatch):
    (tmp_path / "bare.py").write_text("SECTON = 'misspelt'\ndef bare(settings): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ESTIMATORS, "bare", "bare")
    with pytest.raises(ConfigurationError, match=facts("algorithm.bare", "'limit'")):
        changed(Settings.parse({"bare": {"limit": 1}}))


@pytest.fixture
def inheriting(tmp_path, monkeypatch):
    """An estimator whose settings are those of gdpo and one of its own, which has no default."""
    (tmp_path / "inheriting.py").write_text("""
from dataclasses import dataclass

from verl_ext.methods.gdpo import GdpoSettings, gdpo

@dataclass(frozen=True, kw_only=True)
class Mine(GdpoSettings):
    rate: float

SECTION = Mine

def inheriting(settings):
    settings.of("inheriting", Mine).rate
    return gdpo(settings)
""")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "inheriting", raising=False)
    monkeypatch.setitem(ESTIMATORS, "inheriting", "inheriting")


def test_settings_that_inherit_from_another_section_are_not_taken_for_it(inheriting):
    settings = Settings.parse({"inheriting": {"whiten": "token", "rate": 1}})
    assert build("gdpo", settings) == build("gdpo", Settings())
    assert settings.of("inheriting", sections()["inheriting"]).whiten == "token"


def test_a_setting_without_a_default_must_be_set(inheriting):
    for algorithm in ({}, {"inheriting": {}}):
        with pytest.raises(ConfigurationError, match=facts("algorithm.inheriting", "'rate'")):
            build("inheriting", Settings.parse(algorithm))
    assert build("inheriting", Settings.parse({"inheriting": {"rate": 0.5}})).steps
    assert "inheriting" not in preset("hadw")["algorithm"]  # it would need the setting


def test_verls_setting_leaves_the_std_out_of_a_list_with_a_name():
    without = build("fgrpo", Settings.parse({"norm_adv_by_std_in_grpo": False}))
    assert [step.name for step in without.steps] == ["weighted_sum", "center", "weight_by_focal"]
