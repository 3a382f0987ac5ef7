"""Estimators of another package, found by their entry points, are registered, checked, saved and shown as our own."""

import subprocess
from pathlib import Path

import pytest

from tests import fresh
from tests.facts import a_line_says, says

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = """
[verl_ext.estimators]
fading = other_estimators:FADING
dgpo = other_estimators:FADING
grpo = other_estimators:FADING
broken = other_broken:BROKEN
plain = other_plain:PLAIN
no_object = other_plain
canceled = other_plain:CANCELED
"""
MODULE = '''
"""Fading: centered rewards, fading with the number of batches.

    A_i = (r_i - mean_g(r)) * rate^t
"""

from dataclasses import dataclass

from verl_ext import Center, Method, Step, StepResult, WeightedSum, bounded


@dataclass(frozen=True)
class Fade(Step):
    """`x * rate^t`."""

    name = "fade"
    rate: float = bounded(0.5, above=0.0, high=1.0)

    def init(self):
        return {"batches": 0}

    def transform(self, values, batch, state):
        seen = state or self.init()
        factor = self.rate ** seen["batches"]
        return StepResult(values * factor, {"batches": seen["batches"] + 1}, {"fade_factor": factor})


@dataclass(frozen=True)
class FadingSettings:
    """`algorithm.fading`."""

    rate: float = bounded(0.5, above=0.0, high=1.0)
    """Factor per batch."""


def steps_of(section, settings):
    """Center and fade."""
    return WeightedSum(), Center(), Fade(section.rate)


FADING = Method("Fading, 2026", "centered rewards that fade", steps_of, FadingSettings, doc=__doc__)
'''
PLAIN = """
from verl_ext import Center, Method, WeightedSum

PLAIN = Method.from_steps("Plain, 2026", "centered rewards", (WeightedSum(), Center()))
CANCELED = Method.from_steps("Canceled, 2026", "centered twice", (Center(), WeightedSum(), Center()))
"""
PROGRAM = """
import logging
logging.basicConfig(level=logging.WARNING)
import torch
from verl.trainer.ppo import core_algos
from tests.calls import call_on_tensors
from verl_ext.cli import main
from verl_ext.errors import ConfigurationError
from verl_ext.conf import preset

scores, mask = torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.ones(2, 2, dtype=torch.int64)
call = dict(rewards=scores, mask=mask, uids=["a", "a"], config={"fading": {"rate": 0.25}})
first = call_on_tensors("fading", **call)
print("FIRST", *core_algos.get_adv_estimator_fn("fading").args, first.tensor[0, 0].item())
print("SECOND", call_on_tensors("fading", **call, state=first.state).tensor[0, 0].item(), first.state)
try:
    call_on_tensors("fading", **{**call, "config": {"fading": {"rate": 2}}})
except ConfigurationError as error:
    print("REFUSED", error)
print("PRESET", preset("fading")["algorithm"]["fading"])
try:
    call_on_tensors("broken", **call)
except ConfigurationError as error:
    print("BROKEN", error)
more = ["actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.use_dynamic_bsz=True"]
main(["check", "+verl_ext=gdpo", "algorithm.rewards.keys=[acc]", *more])
main(["check", "algorithm.adv_estimator=broken"])
main(["check", "algorithm.adv_estimator=no_object"])
print("CANCELED", main(["check", "algorithm.adv_estimator=canceled", "+algorithm.rewards.keys=[acc]", *more]))
main(["check", "algorithm.adv_estimator=grpo"])
main(["doctor"])
print("DGPO", core_algos.get_adv_estimator_fn("dgpo").func.__module__)
print("GRPO", core_algos.ADV_ESTIMATOR_REGISTRY["grpo"].__name__)
main(["show", "fading"])
main(["show", "fading", "algorithm.fading.rate=0.75"])
main(["show", "plain"])
sys.path.append(ROOT + "/scripts/quality")
from generated_pages import settings
page = " ".join(settings.blocks())
print("PAGE", "algorithm.gdpo" in page, "algorithm.fading" in page)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Return the output of the program in a process that has the other package as pip would install it."""
    site = tmp_path_factory.mktemp("site")
    metadata = site / "other_estimators-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-estimators\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    (site / "other_estimators.py").write_text(MODULE)
    (site / "other_broken.py").write_text('raise RuntimeError("on purpose")\n')
    (site / "other_plain.py").write_text(PLAIN)
    done = fresh.run(f"import sys\nROOT = {str(ROOT)!r}\nsys.path.append({str(site)!r})\n{PROGRAM}")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done


def test_an_estimator_is_registered_checked_and_shown(printed):
    assert "FIRST fading 0.5" in printed.stdout
    assert "SECOND 0.125 {'fade': {'batches': 1}}" in printed.stdout
    assert a_line_says(printed.stdout, "REFUSED", "algorithm.fading.rate", "at most 1", "found 2")
    assert "PRESET {'rate': 0.5}" in printed.stdout
    assert "algorithm.fading.rate=0.75" in printed.stdout
    assert "A_i = (r_i - mean_g(r)) * rate^t" in printed.stdout
    assert "PAGE True False" in printed.stdout  # the page of settings has only the settings of verl_ext


def test_an_estimator_without_a_docstring_is_shown(printed):
    assert "compose.steps=[weighted_sum,center]" in printed.stdout


def test_an_estimator_with_a_step_without_effect_is_rejected(printed):
    assert a_line_says(printed.stdout, "error", "center", "no effect", "Remove center")
    assert "CANCELED 1" in printed.stdout


def test_names_of_verl_ext_and_verl_cannot_be_replaced(printed):
    assert "DGPO verl_ext.advantages.estimator" in printed.stdout
    assert "GRPO compute_grpo_outcome_advantage" in printed.stdout
    assert a_line_says(printed.stdout, "grpo", "other_estimators")


def test_a_broken_estimator_is_named_and_the_other_presets_are_loaded(printed):
    assert a_line_says(printed.stdout, "BROKEN", "'broken'", "other_broken", "on purpose")
    assert a_line_says(printed.stdout, "estimator", "gdpo")
    assert a_line_says(printed.stdout, "accepted:")
    assert a_line_says(printed.stdout, "rejected:")
    assert a_line_says(printed.stdout, "error", "broken", "on purpose")
    assert a_line_says(printed.stdout, "error", "'no_object'", "other_plain", "Method", "package.module:OBJECT")


@pytest.mark.parametrize("words", [("'broken'", "on purpose"), ("'no_object'", "Method")], ids=["broken", "no object"])
def test_an_entry_point_that_cannot_be_loaded_is_warned_about_once(printed, words):
    warnings = [line for line in printed.stderr.splitlines() if line.startswith("WARNING:verl_ext")]
    matching = [line for line in warnings if says(line, *words)]
    assert len(matching) == 1, printed.stderr
