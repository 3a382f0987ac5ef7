"""The net under the redesign: it sees a difference where there is one, and none where there is none."""

import copy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts/quality"))

from same_as import cases, command, renamed  # noqa: E402
from same_as.commands import settings_of  # noqa: E402
from same_as.compare import differences  # noqa: E402
from same_as.spelling import PROBES, Spelling, features, newest  # noqa: E402

import verl_ext  # noqa: E402

NAN = float("nan")
STATE = {"weight_by_history": {"value": 0.5, "window": [0.25], "updates": 2}}
OUTCOME = {
    "error": None,
    "text": "",
    "batches": [
        {
            "advantages": [np.array([0.5, 0.0, NAN])],
            "metrics": {"hadw/updates": 2.0, "reward/acc/mean": 0.1 + 0.2},
            "state": STATE,
        }
    ],
    "dumps": [{"uid": ["p0"], "advantage": [0.5]}],
}


def changed(change):
    outcome = copy.deepcopy(OUTCOME)
    change(outcome)
    return outcome


def in_batch(name, value):
    return lambda outcome: outcome["batches"][0].update({name: value})


def metrics(**more):
    return in_batch("metrics", {**OUTCOME["batches"][0]["metrics"], **more})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (in_batch("advantages", [np.array([0.5001, 0.0, NAN])]), "advantages of batch 1[0][0]: 0.5 | 0.5001"),
        (in_batch("advantages", [np.array([0.5, 1e-9, NAN])]), "advantages of batch 1[0][1]: 0 | 1e-09"),
        (in_batch("advantages", [np.array([0.5, 0.0, 0.0])]), "advantages of batch 1[0][2]: nan | 0"),
        (in_batch("advantages", [np.array([0.5, 0.0])]), "shape"),
        (metrics(**{"reward/acc/mean": 0.3001}), "metric reward/acc/mean"),
        (metrics(other=1.0), "metric other of batch 1: only in the new version"),
        (in_batch("metrics", {"hadw/updates": 2.0}), "metric reward/acc/mean of batch 1: only in the old version"),
        (in_batch("state", {"weight_by_history": {**STATE["weight_by_history"], "updates": 3}}), "updates: 2 | 3"),
        (in_batch("state", {"weight_by_history": {"value": 0.5, "window": [0.25]}}), "updates: only in the old"),
        (lambda outcome: outcome.update(error="DataError"), "the new version DataError"),
        (lambda outcome: outcome.update(dumps=[]), "dump 1: only in the old version"),
        (lambda outcome: outcome["dumps"][0].update(advantage=[0.4]), "column advantage"),
    ],
)
def test_a_difference_is_found_and_says_what_differs(change, words):
    found = differences(OUTCOME, changed(change))
    assert any(words in text for text in found), found


@pytest.mark.parametrize(
    "change",
    [
        lambda outcome: None,
        in_batch("advantages", [np.array([0.5 + 1e-8, 0.0, NAN])]),
        metrics(**{"reward/acc/mean": 0.3}),
        lambda outcome: outcome.update(text="other words"),
    ],
)
def test_rounding_and_other_words_are_no_difference(change):
    assert differences(OUTCOME, changed(change)) == []


def test_a_renamed_metric_or_state_is_compared_under_its_newest_name(monkeypatch):
    monkeypatch.setattr(renamed, "METRICS", (("*/batches", "*/updates"),))
    monkeypatch.setattr(renamed, "STEPS", (("weight_by_past", "weight_by_history"),))
    monkeypatch.setattr(renamed, "STATE", (("batches", "updates"),))
    state = {"weight_by_past": {"value": 0.5, "window": [0.25], "batches": 2}}
    new = changed(in_batch("state", state))
    new["batches"][0]["metrics"] = {"hadw/batches": 2.0, "reward/acc/mean": 0.3}
    assert differences(OUTCOME, new) == []
    assert newest((("a/new/*", "a/old/*"),), "a/old/acc") == "a/new/acc"


def test_settings_are_translated_into_the_spelling_that_a_version_accepts(monkeypatch):
    monkeypatch.setattr(renamed, "SETTINGS", (("dara.variant", "dara.of"),))
    monkeypatch.setattr(renamed, "VALUES", (("dara.variant", ("symmetric", "both")),))
    monkeypatch.setattr(renamed, "STEPS", (("middle", "center"),))
    given = ("dara", {"dara": {"of": "both"}, "compose": {"steps": ["center", {"step": "center", "x": 1}]}})

    def accepts(method, algorithm):
        steps = algorithm.get("compose", {}).get("steps", [])
        variant = algorithm.get("dara", {}).get("variant", "symmetric")
        return "of" not in algorithm.get("dara", {}) and variant != "both" and "center" not in steps

    new, old, neither = Spelling(accepts), Spelling(lambda *_: True), Spelling(lambda *_: False)
    for spelling in (new, old, neither):
        known = [spelling.knows(feature) for feature in ("dara.of", "steps.center")]
        assert known == [spelling is not neither] * 2
    _, algorithm = new.translate(*given)
    assert algorithm["dara"] == {"variant": "symmetric"}
    assert algorithm["compose"]["steps"] == ["middle", {"step": "middle", "x": 1}]
    assert neither.missing("dara", {"dara": {"of": "both"}}) == ["method.dara", "dara.of"]


def run(*words):
    return command.main([str(ROOT), "--kinds", "core", "--batches", "60", *words])


def test_this_checkout_is_the_same_as_itself(capsys):
    assert run() == 0
    assert "no difference" in capsys.readouterr().out


def test_another_number_in_the_package_is_found(capsys, tmp_path):
    """Every advantage of a copy of the package is doubled, wherever its modules are."""
    shutil.copytree(ROOT / "verl_ext", tmp_path / "verl_ext", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    doubled = """
from verl_ext.{module} import build as _build


def build(name, settings):
    import dataclasses

    chain = _build(name, settings)

    def computed(batch, state=None):
        result = chain(batch, state)
        return dataclasses.replace(result, advantages=2 * result.advantages)

    return computed
"""
    module = verl_ext.build.__module__.removeprefix("verl_ext.")
    with (tmp_path / "verl_ext/__init__.py").open("a") as file:
        file.write(doubled.format(module=module))
    assert run("--new", str(tmp_path)) == 1
    assert "advantages of batch 1" in capsys.readouterr().out


def test_the_settings_that_errors_and_warnings_name_are_read():
    text = """estimator  gdpo
  - algorithm.not_an_error=1
1 error
  - algorithm.rewards.keys=[a] lacks b:
    set 'data.train_files=[...]'
1 warning
  - trainer.use_v1=False ignores it
this run is refused by algorithm.nothing"""
    assert settings_of(text) == {
        "errors": {"algorithm.rewards.keys", "data.train_files"},
        "warnings": {"trainer.use_v1"},
    }
    later = "warning: set algorithm.rewards.log=all\nConfigurationError: algorithm.gdpo.whiten is wrong"
    assert settings_of(later) == {"errors": {"algorithm.gdpo.whiten"}, "warnings": {"algorithm.rewards.log"}}


@pytest.mark.parametrize("kind", ["core", "lists"])
def test_a_seed_gives_the_same_case_each_time_and_every_feature_has_a_probe(kind):
    for seed in range(60):
        case, again = (cases.draw(kind, seed) for _ in range(2))
        assert (case.method, case.algorithm) == (again.method, again.algorithm)
        assert {*features(case.method, case.algorithm)} <= PROBES.keys()
