import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

import verl_ext
from tests.facts import NEEDED, a_line_says, says
from tests.tools import made
from verl_ext import Center, Method, WeightedSum, build
from verl_ext.cli import main
from verl_ext.registry import ENTRY_POINT_GROUP, ESTIMATORS
from verl_ext.settings import RewardsSettings
from verl_ext.tools.arguments import parse_settings


@pytest.fixture
def show(capsys):
    return lambda *arguments, status=0: made.call(capsys, "show", *arguments, status=status)


def test_it_prints_the_steps_their_formulas_and_the_effective_settings(show):
    assert "A_ik = (r_ik - mean_g(r_k)) / std_g(r_k)" in show("gdpo", "+algorithm.rewards.keys=[x,y]")
    text = show("gdpo", "algorithm.gdpo.scale=mad", "+algorithm.rewards.keys=[x,y]")
    assert "arXiv 2601.05242" in text
    assert "std_g" not in text
    numbered = re.findall(r"^  \d  (\w+) +(.*)$", text, re.MULTILINE)
    assert [name for name, _ in numbered] == ["center", "scale_by_mad", "weighted_sum", "whiten"]
    assert all("x" in formula and formula.count("`") >= 2 for _, formula in numbered)
    for line in ("algorithm.gdpo.scale=mad", "algorithm.gdpo.epsilon=null", "'algorithm.rewards.keys=[x,y]'"):
        assert f"  {line}\n" in text
    assert "algorithm.gdpo.epsilon" in show("hadw", "algorithm.hadw.base=gdpo")


def test_without_a_name_it_lists_the_estimators(show):
    lines = show().splitlines()
    assert [line.split()[0] for line in lines] == list(ESTIMATORS)
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"compose"}))
@pytest.mark.parametrize("more", [[], ["algorithm.hadw.base=gdpo", "algorithm.rewards.accuracy_key=right"]])
def test_the_list_that_it_prints_is_the_estimator(name, more, show):
    needed = [f"algorithm.{name}.{key}={value}" for key, value in NEEDED.get(name, {}).items()]
    line = show(name, *more, *needed).splitlines()[-1]
    (steps,) = re.findall(r"'\+(algorithm\.compose\.steps=.*)'", line)
    named = build(name, parse_settings([made.KEYS, *more, *needed]))
    composed = build("compose", parse_settings([made.KEYS, steps]))
    assert composed == named
    np.testing.assert_array_equal(composed(made.batch()).advantages, named(made.batch()).advantages)
    assert ("+algorithm.rewards.accuracy_key=right" in line) == (bool(more) and named.needs_accuracy)


def test_a_custom_list_is_shown_with_its_steps(show):
    steps = "[weighted_sum,center,{step:tests.integration.custom_steps:Clip,limit:1.5}]"
    text = show("compose", f"algorithm.compose.steps={steps}")
    assert says(text, "`x` between -limit and limit.", "limit=1.5", f"{steps}'")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gdop"], ("'gdop'", "did you mean 'gdpo'")),
        (["gdpo", "algorithm.rewards.keys=[x"], ("'algorithm.rewards.keys=[x'", "[a,b]")),
        (["gdpo", "whiten"], ("whiten", "KEY=VALUE")),
        (["gdpo", "algorithm.gdpo.scael=mad"], ("did you mean 'scale'",)),
        (["gdpo", "+verl_ext=gdpo"], ("'+verl_ext=gdpo'", "without `=`")),
    ],
)
def test_a_wrong_argument_is_rejected_with_the_valid_ones(arguments, words, show):
    assert says(show(*arguments, status=1), *words)


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
def test_a_package_that_is_not_installed_is_named_with_the_line_that_installs_it(command, package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(command) == 1
    assert says(capsys.readouterr().err, command[0], package, "pip install 'verl_ext[verl]'")


def test_recipes_that_exist_are_not_overwritten(tmp_path, capsys):
    assert main(["recipes", str(tmp_path)]) == 0
    (tmp_path / "recipes/README.md").write_text("mine")
    assert main(["recipes", str(tmp_path)]) == 1
    assert says(capsys.readouterr().err, f"{tmp_path}/recipes", "recipes FOLDER")
    assert (tmp_path / "recipes/README.md").read_text() == "mine"


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
    theirs = {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [2.0, 1.0]}
    assert parse_settings(["algorithm.rewards.keys=[b]"], theirs).rewards == RewardsSettings(("b",))
