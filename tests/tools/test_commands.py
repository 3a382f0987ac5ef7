"""What the command line says before a command can begin."""

from __future__ import annotations

import sys

import pytest

from tests.facts import says
from verl_ext.cli import main
from verl_ext.registry import ESTIMATORS


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


def test_recipes_that_are_there_already_are_left_alone(tmp_path, capsys):
    assert main(["recipes", str(tmp_path)]) == 0
    (tmp_path / "recipes/README.md").write_text("mine")
    assert main(["recipes", str(tmp_path)]) == 1
    assert says(capsys.readouterr().err, f"{tmp_path}/recipes", "recipes FOLDER")
    assert (tmp_path / "recipes/README.md").read_text() == "mine"


@pytest.mark.parametrize("typed", ["gpdo", "GDOP"])
def test_letters_that_changed_places_are_a_near_name(typed, capsys):
    assert main(["show", typed]) == 1
    assert says(capsys.readouterr().err, f"'{typed}'", "did you mean 'gdpo'")


def test_an_estimator_of_ones_own_without_a_docstring_is_listed_by_its_module(monkeypatch, capsys):
    monkeypatch.setitem(ESTIMATORS, "ranked", "tests.facts")
    monkeypatch.setattr("tests.facts.__doc__", None)
    assert main(["show"]) == 0
    assert any(line.split()[:2] == ["ranked", "tests.facts,"] for line in capsys.readouterr().out.splitlines())
