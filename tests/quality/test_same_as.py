"""The comparison of two versions of the package: it reports each difference in results, and nothing else."""

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
    """Return a copy of `OUTCOME` to which a function has been applied."""
    outcome = copy.deepcopy(OUTCOME)
    change(outcome)
    return outcome


def set_in_batch(name, value):
    """Return a function that replaces a result of the only batch."""
    return lambda outcome: outcome["batches"][0].update({name: value})


def set_advantages(*values):
    return set_in_batch("advantages", [np.array(values)])


def set_metric(name, value):
    return set_in_batch("metrics", {**OUTCOME["batches"][0]["metrics"], name: value})


def set_state(state):
    return set_in_batch("state", {"weight_by_history": state})


OTHER_COUNT = {**STATE["weight_by_history"], "updates": 3}
WITHOUT_COUNT = {"value": 0.5, "window": [0.25]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_advantages(0.5001, 0.0, NAN), "advantages of batch 1[0][0]: 0.5 | 0.5001"),
        (set_advantages(0.5, 1e-9, NAN), "advantages of batch 1[0][1]: 0 | 1e-09"),
        (set_advantages(0.5, 0.0, 0.0), "advantages of batch 1[0][2]: nan | 0"),
        (set_advantages(0.5, 0.0), "shape"),
        (set_metric("reward/acc/mean", 0.3001), "metric reward/acc/mean"),
        (set_metric("other", 1.0), "metric other of batch 1: only in the new version"),
        (set_in_batch("metrics", {"hadw/updates": 2.0}), "metric reward/acc/mean of batch 1: only in the old version"),
        (set_state(OTHER_COUNT), "updates: 2 | 3"),
        (set_state(WITHOUT_COUNT), "updates: only in the old"),
        (lambda outcome: outcome.update(error="DataError"), "the new version DataError"),
        (lambda outcome: outcome.update(dumps=[]), "dump 1: only in the old version"),
        (lambda outcome: outcome["dumps"][0].update(advantage=[0.4]), "column advantage"),
    ],
)
def test_difference_is_reported(change, message):
    reported = differences(OUTCOME, changed(change))
    assert any(message in text for text in reported), reported


@pytest.mark.parametrize(
    "change",
    [
        lambda outcome: None,
        set_advantages(0.5 + 1e-8, 0.0, NAN),
        set_metric("reward/acc/mean", 0.3),
        lambda outcome: outcome.update(text="other words"),
    ],
    ids=["nothing", "an advantage within rounding", "a metric within rounding", "the wording of a message"],
)
def test_rounding_and_wording_are_no_difference(change):
    assert differences(OUTCOME, changed(change)) == []


def test_renamed_metric_or_state_is_compared_by_its_newest_name(monkeypatch):
    monkeypatch.setattr(renamed, "METRICS", (("*/batches", "*/updates"),))
    monkeypatch.setattr(renamed, "STEPS", (("weight_by_past", "weight_by_history"),))
    monkeypatch.setattr(renamed, "STATE", (("batches", "updates"),))
    new = copy.deepcopy(OUTCOME)
    (batch,) = new["batches"]
    batch["state"] = {"weight_by_past": {"value": 0.5, "window": [0.25], "batches": 2}}
    batch["metrics"] = {"hadw/batches": 2.0, "reward/acc/mean": 0.3}
    assert differences(OUTCOME, new) == []


def test_newest_name_keeps_the_part_of_the_wildcard():
    assert newest((("a/new/*", "a/old/*"),), "a/old/acc") == "a/new/acc"


@pytest.fixture
def renamed_settings(monkeypatch):
    """A version has renamed a setting, a value and a step: `dara.of=both` and `center` are the older names."""
    monkeypatch.setattr(renamed, "SETTINGS", (("dara.variant", "dara.of"),))
    monkeypatch.setattr(renamed, "VALUES", (("dara.variant", ("symmetric", "both")),))
    monkeypatch.setattr(renamed, "STEPS", (("middle", "center"),))


def accepts_new_names(method, algorithm):
    dara = algorithm.get("dara", {})
    steps = algorithm.get("compose", {}).get("steps", [])
    return "of" not in dara and dara.get("variant") != "both" and "center" not in steps


def accepts_everything(method, algorithm):
    return True


def accepts_nothing(method, algorithm):
    return False


RENAMED_FEATURES = ("dara.of", "steps.center")


def spelling_of(accepts):
    """Return the names of a version that has been asked for the renamed features."""
    spelling = Spelling(accepts)
    for feature in RENAMED_FEATURES:
        spelling.knows(feature)
    return spelling


@pytest.mark.usefixtures("renamed_settings")
@pytest.mark.parametrize(
    ("accepts", "is_known"), [(accepts_new_names, True), (accepts_everything, True), (accepts_nothing, False)]
)
@pytest.mark.parametrize("feature", RENAMED_FEATURES)
def test_feature_is_known_if_a_version_accepts_one_of_its_names(accepts, is_known, feature):
    assert Spelling(accepts).knows(feature) == is_known


@pytest.mark.usefixtures("renamed_settings")
def test_settings_are_translated_into_the_names_that_a_version_accepts():
    old = {"dara": {"of": "both"}, "compose": {"steps": ["center", {"step": "center", "x": 1}]}}
    _, algorithm = spelling_of(accepts_new_names).translate("dara", old)
    assert algorithm["dara"] == {"variant": "symmetric"}
    assert algorithm["compose"]["steps"] == ["middle", {"step": "middle", "x": 1}]


@pytest.mark.usefixtures("renamed_settings")
def test_features_that_a_version_does_not_have_are_missing():
    missing = spelling_of(accepts_nothing).missing("dara", {"dara": {"of": "both"}})
    assert missing == ["method.dara", "dara.of"]


def compare_with_this_checkout(*options):
    """Compare 60 batches with this checkout, and return the exit status."""
    return command.main([str(ROOT), "--kinds", "core", "--batches", "60", *options])


def test_this_checkout_has_no_difference_from_itself(capsys):
    assert compare_with_this_checkout() == 0
    assert "no difference" in capsys.readouterr().out


DOUBLE_ADVANTAGES = """
from verl_ext.{module} import build as _build


def build(name, settings):
    import dataclasses

    chain = _build(name, settings)

    def compute(batch, state=None):
        result = chain(batch, state)
        return dataclasses.replace(result, advantages=2 * result.advantages)

    return compute
"""


def test_other_advantages_of_a_copy_of_the_package_are_reported(capsys, tmp_path):
    shutil.copytree(ROOT / "verl_ext", tmp_path / "verl_ext", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    module_of_build = verl_ext.build.__module__.removeprefix("verl_ext.")
    with (tmp_path / "verl_ext/__init__.py").open("a") as file:
        file.write(DOUBLE_ADVANTAGES.format(module=module_of_build))
    assert compare_with_this_checkout("--new", str(tmp_path)) == 1
    assert "advantages of batch 1" in capsys.readouterr().out


OUTPUT_OF_CHECK = """estimator  gdpo
  - algorithm.not_an_error=1
1 error
  - algorithm.rewards.keys=[a] lacks b:
    set 'data.train_files=[...]'
1 warning
  - trainer.use_v1=False ignores it
this run is refused by algorithm.nothing"""
LOG_OF_A_RUN = """warning: set algorithm.rewards.log=all
ConfigurationError: algorithm.gdpo.whiten is wrong"""


def test_settings_are_read_from_the_errors_and_warnings_of_check():
    settings = settings_of(OUTPUT_OF_CHECK)
    assert settings["errors"] == {"algorithm.rewards.keys", "data.train_files"}
    assert settings["warnings"] == {"trainer.use_v1"}


def test_settings_are_read_from_the_errors_and_warnings_of_a_log():
    settings = settings_of(LOG_OF_A_RUN)
    assert settings["errors"] == {"algorithm.gdpo.whiten"}
    assert settings["warnings"] == {"algorithm.rewards.log"}


@pytest.mark.parametrize("kind", ["core", "lists"])
def test_seed_gives_the_same_case_whose_features_can_be_probed(kind):
    for seed in range(60):
        case = cases.draw(kind, seed)
        repeated = cases.draw(kind, seed)
        assert repeated.method == case.method
        assert repeated.algorithm == case.algorithm
        assert set(features(case.method, case.algorithm)) <= PROBES.keys()
