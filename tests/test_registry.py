"""The estimators by name, and those of other packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.facts import facts
from verl_ext import Settings, build, registry
from verl_ext.errors import ConfigurationError
from verl_ext.registry import BUILT_IN, ESTIMATORS
from verl_ext.settings import sections

# The source of a module of another package, whose function is `broken`, and what an error says of it.
BROKEN = {
    "raises as it is imported": ("raise RuntimeError('on purpose')", "on purpose"),
    "is not there": ("", "broken"),
    "raises": ("def broken(settings): 1 / 0", "division by zero"),
    "refuses its settings": (
        "from verl_ext import errors\ndef broken(settings): raise errors.ConfigurationError('broken.limit')",
        "broken.limit",
    ),
}


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> None:
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(ESTIMATORS, "_known", {**ESTIMATORS, name: f"{name}:{name}"})


@pytest.mark.parametrize("kind", BROKEN)
def test_one_that_is_broken_is_an_error_for_its_own_run_only(kind, tmp_path, monkeypatch):
    source, told = BROKEN[kind]
    module(tmp_path, monkeypatch, "broken", source)
    assert {"gdpo", "hadw", "rewards"} < set(sections())
    assert build("gdpo", Settings.parse({"gdpo": {"whiten": "token"}})).steps
    error = ZeroDivisionError if kind == "raises" else ConfigurationError
    with pytest.raises(error, match=facts(told)):
        build("broken", Settings())


def test_a_broken_one_of_this_package_is_an_error_for_all(monkeypatch):
    monkeypatch.setattr(ESTIMATORS, "_known", {**ESTIMATORS, "gdpo": "no_such_module:gdpo"})
    with pytest.raises(ConfigurationError, match=facts("'gdpo'", "no_such_module:gdpo")):
        registry.declarations()


@pytest.mark.parametrize("name", ["grpo", "gae", "gdpo"])
def test_an_entry_point_with_a_name_that_is_taken_is_refused_by_the_run_that_names_it(name, monkeypatch):
    pytest.importorskip("verl")
    from tests.integration.configs import compose
    from verl_ext.integration.checks import judge

    monkeypatch.setattr(ESTIMATORS, "entry_points", {name: "other_package:mine"})
    monkeypatch.delattr(ESTIMATORS, "_known", raising=False)
    assert set(ESTIMATORS) == set(BUILT_IN)
    assert ESTIMATORS.get(name) != "other_package:mine"
    for chosen in (name, "rloo"):
        errors = judge(compose(f"algorithm.adv_estimator={chosen}")).errors
        assert any("other_package:mine" in text for text in errors) == (chosen == name)
