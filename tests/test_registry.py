"""The estimators by name, and those of other packages."""

from __future__ import annotations

import sys

import pytest

from tests.facts import facts
from verl_ext import Settings, build
from verl_ext.errors import ConfigurationError
from verl_ext.registry import ESTIMATORS
from verl_ext.settings import sections


@pytest.mark.parametrize(("source", "told"), [("raise RuntimeError('on purpose')", "on purpose"), ("", "'broken'")])
def test_one_that_cannot_be_loaded_is_an_error_for_its_own_run_only(source, told, tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    monkeypatch.setitem(ESTIMATORS, "broken", "broken")
    assert {"gdpo", "hadw", "rewards"} < set(sections())
    assert build("gdpo", Settings.parse({"gdpo": {"whiten": "token"}})).steps
    with pytest.raises(ConfigurationError, match=facts(told)):
        build("broken", Settings())


def test_an_estimator_without_settings_takes_none(tmp_path, monkeypatch):
    (tmp_path / "bare.py").write_text("SECTON = 'misspelt'\ndef bare(settings): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ESTIMATORS, "bare", "bare")
    with pytest.raises(ConfigurationError, match=facts("algorithm.bare", "'limit'")):
        Settings.parse({"bare": {"limit": 1}})
