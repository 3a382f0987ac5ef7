"""The simulated policies: GRPO's learning rate, reproducible results, and a page with the stored numbers."""

import importlib
import itertools
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = str(ROOT / "scripts/evidence")
sys.path.insert(0, SCRIPTS)
policies = importlib.import_module("softmax_policies")
simulate = importlib.import_module("simulate_policies")
sys.path.remove(SCRIPTS)


@pytest.fixture(scope="module")
def results():
    return json.loads(simulate.RESULTS.read_text(encoding="utf-8"))


STUDIES_AND_CONDITIONS = list(itertools.product(simulate.STUDIES, simulate.CONDITIONS))


def test_calibration_seeds_are_not_compared():
    assert not set(policies.CALIBRATION) & set(simulate.SEEDS)
    assert not set(policies.SIZES) & set(simulate.SEEDS)


@pytest.mark.parametrize(("key", "name"), STUDIES_AND_CONDITIONS)
def test_grpo_closes_half_of_its_gap_on_the_calibration_seeds(results, key, name):
    study = simulate.STUDIES[key]
    grpo = study.arms[0]
    rate = results[key][name]["rates"][grpo.label]
    worlds = [policies.World(study, seed) for seed in policies.CALIBRATION]
    closed_fraction = policies.learnt(worlds, grpo, rate, simulate.CONDITIONS[name])
    assert 0.5 <= round(closed_fraction, 3) < 0.515


@pytest.mark.parametrize(("key", "name"), STUDIES_AND_CONDITIONS)
def test_seed_reproduces_the_stored_values(results, key, name):
    study = simulate.STUDIES[key]
    stored = results[key][name]
    for arm in study.arms:
        world = policies.World(study, 1)
        values = policies.train(world, arm, stored["rates"][arm.label], simulate.CONDITIONS[name])
        for measure in study.measures:
            stored_value = stored["values"][arm.label][measure][1]
            assert values[measure] == pytest.approx(stored_value, rel=1e-6)


def page_of_the_experiment():
    """Return the page of the simulated policies."""
    return (ROOT / "scripts/evidence/simulated_policies.md").read_text(encoding="utf-8")


def section_of_the_results():
    """Return the section about the simulated policies of the page with all results."""
    page = (ROOT / "docs/pages/results.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^### Simulated policies\n(.*?)^###", page, re.M | re.S)
    return section


@pytest.mark.parametrize(("text", "least"), [(page_of_the_experiment, 11), (section_of_the_results, 6)])
def test_every_signed_number_of_a_page_is_in_a_table(results, text, least):
    tables = " ".join(simulate.table(study, results[key]) for key, study in simulate.STUDIES.items())
    numbers = re.findall(r"[+-]\d+\.\d+", text())
    assert len(numbers) >= least
    for number in numbers:
        assert number in tables
