"""The simulated policies: fair conditions, and a page with the stored figures."""

import importlib
import itertools
import json
import re
import sys
from pathlib import Path

import pytest

SCRIPTS = str(Path(__file__).parents[1] / "scripts/evidence")
sys.path.insert(0, SCRIPTS)
policies = importlib.import_module("softmax_policies")
simulate = importlib.import_module("simulate_policies")
sys.path.remove(SCRIPTS)


@pytest.fixture(scope="module")
def results():
    return json.loads(simulate.RESULTS.read_text(encoding="utf-8"))


CELLS = [*itertools.product(simulate.STUDIES, simulate.CONDITIONS)]


@pytest.mark.parametrize(("key", "name"), CELLS)
def test_grpo_closes_half_of_its_gap_on_seeds_that_are_not_compared(results, key, name):
    assert not {*policies.CALIBRATION, *policies.SIZES} & set(simulate.SEEDS)
    condition, study = simulate.CONDITIONS[name], simulate.STUDIES[key]
    rate = results[key][name]["rates"][study.arms[0].label]
    worlds = [policies.World(study, seed) for seed in policies.CALIBRATION]
    assert 0.5 <= round(policies.learnt(worlds, study.arms[0], rate, condition), 3) < 0.515


@pytest.mark.parametrize(("key", "name"), CELLS)
def test_a_seed_gives_the_stored_values(results, key, name):
    stored, study = results[key][name], simulate.STUDIES[key]
    for arm in study.arms:
        found = policies.train(policies.World(study, 1), arm, stored["rates"][arm.label], simulate.CONDITIONS[name])
        for measure in study.measures:
            assert found[measure] == pytest.approx(stored["values"][arm.label][measure][1], rel=1e-6)


def test_every_signed_figure_of_the_page_stands_in_a_table(results):
    page = (Path(__file__).parents[1] / "docs/pages/estimators_compared.md").read_text(encoding="utf-8")
    tables = " ".join(simulate.table(study, results[key]) for key, study in simulate.STUDIES.items())
    figures = re.findall(r"[+-]\d+\.\d+", page)
    assert len(figures) > 10
    assert [figure for figure in figures if figure not in tables] == []
