"""`show` prints an estimator, and the list of steps that it prints is the estimator."""

import re
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import verl_ext
from tests.facts import NEEDED, a_line_says, says
from tests.tools.run_files import KEYS, example_batch
from verl_ext import Center, Method, Step, WeightedSum, build
from verl_ext.cli import main
from verl_ext.registry import ENTRY_POINT_GROUP, ESTIMATORS
from verl_ext.settings import RewardsSettings
from verl_ext.tools.arguments import parse_settings

X_AND_Y = "+algorithm.rewards.keys=[x,y]"


def test_the_formula_is_printed_with_default_settings(show):
    formula = "A_ik = (r_ik - mean_g(r_k)) / std_g(r_k)"
    assert formula in show("gdpo", X_AND_Y)
    assert "std_g" not in show("gdpo", "algorithm.gdpo.scale=mad", X_AND_Y)


def test_the_paper_and_the_steps_with_their_formulas_are_printed(show):
    text = show("gdpo", "algorithm.gdpo.scale=mad", X_AND_Y)
    assert "arXiv 2601.05242" in text
    formula_of_step = dict(re.findall(r"^  \d  (\w+) +(.*)$", text, re.MULTILINE))
    assert list(formula_of_step) == ["center", "scale_by_mad", "weighted_sum", "whiten"]
    for formula in formula_of_step.values():
        assert "x" in formula
        assert formula.count("`") >= 2


def test_the_effective_settings_are_printed(show):
    text = show("gdpo", "algorithm.gdpo.scale=mad", X_AND_Y)
    for setting in ("algorithm.gdpo.scale=mad", "algorithm.gdpo.epsilon=null", "'algorithm.rewards.keys=[x,y]'"):
        assert f"  {setting}\n" in text


def test_the_settings_of_the_base_are_printed(show):
    assert "algorithm.gdpo.epsilon" in show("hadw", "algorithm.hadw.base=gdpo")


def test_without_a_name_it_lists_the_estimators(show):
    lines = [line.split() for line in show().splitlines()]
    assert [words[0] for words in lines] == list(ESTIMATORS)
    for words in lines:
        assert len(words) > 3, words


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"compose"}))
@pytest.mark.parametrize(
    "overrides",
    [[], ["algorithm.hadw.base=gdpo", "algorithm.rewards.accuracy_key=correct"]],
    ids=["default", "base and accuracy"],
)
def test_the_list_that_it_prints_is_the_estimator(name, overrides, show):
    needed = [f"algorithm.{name}.{key}={value}" for key, value in NEEDED.get(name, {}).items()]
    estimator = build(name, parse_settings([KEYS, *overrides, *needed]))
    last_line = show(name, *overrides, *needed).splitlines()[-1]
    (steps,) = re.findall(r"'\+(algorithm\.compose\.steps=.*)'", last_line)
    composed = build("compose", parse_settings([KEYS, steps]))
    assert composed == estimator
    batch = example_batch()
    np.testing.assert_array_equal(composed(batch).advantages, estimator(batch).advantages)
    names_accuracy = "+algorithm.rewards.accuracy_key=correct" in last_line
    assert names_accuracy == (estimator.needs_accuracy and bool(overrides))


@dataclass(frozen=True)
class Clip(Step):
    """`x` between -limit and limit."""

    name: ClassVar[str] = "clip"
    limit: float = 1.0

    def apply(self, values, batch):
        return np.clip(values, -self.limit, self.limit)


def test_a_custom_list_is_shown_with_its_steps(show):
    steps = f"[weighted_sum,center,{{step:{__name__}:Clip,limit:1.5}}]"
    text = show("compose", f"algorithm.compose.steps={steps}")
    assert says(text, "`x` between -limit and limit.", "limit=1.5", f"{steps}'")


REJECTED = {
    "a misspelled estimator": (["gdop"], ["'gdop'", "did you mean 'gdpo'"]),
    "an open bracket": (["gdpo", "algorithm.rewards.keys=[x"], ["'algorithm.rewards.keys=[x'", "[a,b]"]),
    "no value": (["gdpo", "whiten"], ["whiten", "KEY=VALUE"]),
    "several values": (["gdpo", "algorithm.gdpo.scale=std,mad"], ["algorithm.gdpo.scale=std,mad", "KEY=VALUE"]),
    "a misspelled setting": (["gdpo", "algorithm.gdpo.scael=mad"], ["did you mean 'scale'"]),
    "a preset": (["gdpo", "+verl_ext=gdpo"], ["'+verl_ext=gdpo'", "without `=`"]),
}


@pytest.mark.parametrize(("arguments", "message"), REJECTED.values(), ids=REJECTED)
def test_a_wrong_argument_is_rejected_with_the_valid_ones(arguments, message, show):
    assert says(show(*arguments, status=1), *message)


@pytest.mark.parametrize(
    ("command", "package"),
    [
        (("check", "algorithm.adv_estimator=grpo"), "verl"),
        (("rehearse", "algorithm.adv_estimator=grpo"), "verl"),
        (("show", "gdpo"), "hydra"),
        (("compare", "rollouts.jsonl", "gdpo"), "pandas"),
        (("report", "metrics.jsonl"), "pandas"),
    ],
)
def test_the_error_about_a_missing_package_says_how_to_install_it(command, package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(command) == 1
    assert says(capsys.readouterr().err, command[0], package, "pip install 'verl_ext[verl]'")


def test_recipes_that_exist_are_not_overwritten(tmp_path, capsys):
    assert main(["recipes", str(tmp_path)]) == 0
    readme = tmp_path / "recipes/README.md"
    readme.write_text("mine")
    assert main(["recipes", str(tmp_path)]) == 1
    assert says(capsys.readouterr().err, f"{tmp_path}/recipes", "recipes FOLDER")
    assert readme.read_text() == "mine"


def test_in_a_clone_no_recipes_are_copied(monkeypatch, capsys):
    clone = Path(verl_ext.__file__).parents[1]
    monkeypatch.chdir(clone)
    before = sorted(clone.glob("recipes/*"))
    assert main(["recipes"]) == 0
    assert says(capsys.readouterr().out, "recipes", "README.md")
    assert sorted(clone.glob("recipes/*")) == before


def test_a_method_of_another_package_is_listed_and_shown(monkeypatch, show):
    method = Method.from_steps("Ranks, arXiv 1", "ranks the responses", (WeightedSum(), Center()))
    monkeypatch.setitem(ESTIMATORS, "ranked", method)
    assert a_line_says(show(), "ranked", "Ranks, arXiv 1: ranks the responses.")
    text = show("ranked")
    assert says(text, "Ranks, arXiv 1: ranks the responses.", "compose.steps=[weighted_sum,center]")
    assert "formula" not in text.splitlines()


def test_a_method_that_cannot_be_loaded_is_listed_with_the_reason(monkeypatch, show):
    broken = EntryPoint("broken", "no_such_package:METHOD", ENTRY_POINT_GROUP)
    monkeypatch.setitem(ESTIMATORS, "broken", broken)
    assert a_line_says(show(), "broken", "no_such_package:METHOD", "Install its package again")
    assert says(show("broken", status=1), "'broken'", "no_such_package:METHOD")


def test_other_keys_than_those_of_a_run_do_not_get_its_weights():
    algorithm_of_run = {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [2.0, 1.0]}
    settings = parse_settings(["algorithm.rewards.keys=[b]"], algorithm_of_run)
    assert settings.rewards == RewardsSettings(keys=("b",))


@pytest.mark.parametrize("deletion", ["~algorithm.rewards.keys", "~algorithm.rewards.keys=[a,b]"])
def test_a_deletion_resets_a_setting_of_the_run(deletion):
    run = {"rewards": {"keys": ["a", "b"]}}
    assert parse_settings([deletion], run).rewards.keys is None
