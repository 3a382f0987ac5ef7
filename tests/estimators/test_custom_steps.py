"""Custom steps in a list, and the dry run of a list on synthetic batches."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.calls import call
from tests.estimators.test_compose import SUMMED, as_text, composed, findings_at_start_up
from tests.facts import a_line_says, facts, says
from tests.integration import custom_steps
from tests.tools.run_files import KEYS, run_command, write_dump
from verl_ext import Batch
from verl_ext.errors import CheckpointError, ConfigurationError

OWN = "tests.integration.custom_steps"
X = {"rewards": {"keys": ["x"]}}
XY = {"rewards": {"keys": ["x", "y"]}}


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"step": f"{OWN}:Clip", "limit": 0}, (f"{OWN}:Clip.limit", "above 0", "found 0")),
        ("raises_at_import:Step", ("'raises_at_import:Step'", "RuntimeError: on purpose")),
        (f"{OWN}:Nameless", (f"'{OWN}:Nameless'", "verl_ext.Step")),
    ],
    ids=["wrong setting", "raises at import", "without a name"],
)
def test_a_custom_step_that_cannot_be_used_is_rejected_with_the_cause(step, words, tmp_path, monkeypatch):
    (tmp_path / "raises_at_import.py").write_text('raise RuntimeError("on purpose")')
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match=facts("algorithm.compose.steps[2]", *words)):
        composed(*SUMMED, step)


OLD_STEPS = """
from dataclasses import dataclass
from verl_ext import Step, WeightedSum

@dataclass(frozen=True)
class Scaled(WeightedSum):
    name = "scaled"
    {attribute}
"""


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("weights: tuple[float, ...] | None = None", ("'weights'", "Remove it", "`batch.weights`")),
        ('after = {"center": "because"}', ("'after'", "Remove it", "`after_center`")),
        ('not_after = {"center": "because"}', ("'not_after'", "Remove it", "`before_sum`")),
        ('undoes = {"center": "because"}', ("'undoes'", "Remove it", "measured on synthetic batches")),
    ],
    ids=["weights", "after", "not_after", "undoes"],
)
def test_a_list_with_a_step_written_for_an_earlier_version_is_rejected(attribute, words, tmp_path, monkeypatch):
    (tmp_path / "old_steps.py").write_text(OLD_STEPS.format(attribute=attribute))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "old_steps", raising=False)
    with pytest.raises(ConfigurationError, match=facts("algorithm.compose.steps[0]", "step Scaled", *words)):
        composed("old_steps:Scaled", "center")


def test_a_custom_step_that_centers_counts_as_center():
    chain = composed("weighted_sum", f"{OWN}:Middle", "scale_by_mad", "weight_by_history", **XY)
    assert chain.steps[1].name == "middle"
    assert findings_at_start_up("weighted_sum", f"{OWN}:Middle", "divide_by_batch_std", **XY) == []


def test_a_custom_step_without_a_state_may_occur_twice():
    clip = f"{OWN}:Clip"
    chain = composed("weighted_sum", clip, "center", clip)
    assert len(chain.steps) == 4


def test_a_custom_step_with_a_state_may_occur_only_once():
    with pytest.raises(ConfigurationError, match=facts("'slower'", "more than once")):
        composed(*SUMMED, f"{OWN}:Slower", f"{OWN}:Slower")


def test_a_custom_step_may_sum_the_rewards():
    """The lowest rewards are 1 and 0 in group a, and 0 and 0 in group b."""
    rewards = [[1.0, 3.0], [0.0, 1.0], [2.0, 0.0], [5.0, 0.0]]
    batch = Batch.of(rewards, list("aabb"), keys=("x", "y"))
    chain = composed(f"{OWN}:Lowest", "center", **XY)
    assert chain(batch).advantages.tolist() == [0.5, -0.5, 0, 0]
    assert not chain.per_reward


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        (["weighted_sum", f"{OWN}:Lowest", "center"], ("weighted_sum", "found 2")),
        (
            ["center", f"{OWN}:Lowest", "drop_conflicts"],
            ("drop_conflicts must come before the sum", "drop_conflicts before lowest"),
        ),
    ],
    ids=as_text,
)
def test_a_custom_step_that_sums_counts_as_the_sum(steps, words):
    with pytest.raises(ConfigurationError, match=facts(*words)):
        composed(*steps, **XY)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([*SUMMED, f"{OWN}:Broken"], ("fails in line", "KeyError", "custom_steps.py", "Remove the step")),
        ([*SUMMED, f"{OWN}:Infinite"], ("not finite",)),
        ([*SUMMED, f"{OWN}:Pair"], ("'pair'", "[1, 2]")),
        ([f"{OWN}:Least", *SUMMED], ("'least'", "(28, 1)", "(28, 2)")),
        ([*SUMMED, f"{OWN}:Signs"], ("algorithm.rewards.weights", "no effect")),
        (["whiten", *SUMMED], ("found 2", "weighted_sum")),
        ([f"{OWN}:Lowest", "center"], ("algorithm.rewards.weights", "no effect")),
        (["soft_min", "center"], ("algorithm.rewards.weights", "no effect")),
        ([*SUMMED, "divide_by_mean"], ("divide_by_mean", "at least 0", "center")),
    ],
    ids=as_text,
)
@pytest.mark.filterwarnings("error")
def test_a_list_that_fails_on_synthetic_batches_is_rejected(steps, words):
    rewards = {"keys": ["x", "y"], "weights": [1.0, 1.0]}
    first, *others = findings_at_start_up(*steps, rewards=rewards)
    assert first.severity == "error"
    assert says(first, *words)
    assert {finding.severity for finding in others} <= {"warning"}  # a custom step may hide the effect of a step


@pytest.mark.parametrize(
    "steps",
    [
        [*SUMMED, f"{OWN}:Slower"],
        [*SUMMED, "weight_by_difficulty", "weight_by_history"],
        ["center", f"{OWN}:Clip", "weighted_sum", "whiten"],
        [{"step": "weight_by_variation", "min_values": [1.0, -3.0]}, *SUMMED],
    ],
    ids=as_text,
)
@pytest.mark.parametrize("weights", [None, [1.0, 2.0], [1.0, 0.0]], ids=str)
def test_a_valid_list_has_no_findings_whatever_the_weights(steps, weights):
    assert findings_at_start_up(*steps, rewards={"keys": ["x", "y"], "weights": weights}) == []


@pytest.mark.parametrize("weights", [None, [1.0, 2.0], [1.0, 0.0]], ids=str)
def test_each_reward_needs_a_minimum_value(weights):
    one_minimum = {"step": "weight_by_variation", "min_values": [1.0]}
    (finding,) = findings_at_start_up(one_minimum, *SUMMED, rewards={"keys": ["x", "y"], "weights": weights})
    assert says(finding, "min_values", "2 numbers")


def test_a_list_that_reads_fields_of_verls_batch_has_no_dry_run():
    """A synthetic batch has no such fields. So the second `center` may have an effect that cannot be measured."""
    steps = [*SUMMED, f"{OWN}:BySource"]
    assert composed(*steps).needs_fields == ("data_source",)
    assert findings_at_start_up(*steps) == []
    assert findings_at_start_up("center", f"{OWN}:BySource", *SUMMED, **XY) == []


@pytest.mark.parametrize(
    "steps", [["weighted_sum", f"{OWN}:Middle"], [f"{OWN}:Middle", "scale_by_std", "weighted_sum"]], ids=as_text
)
def test_a_custom_step_that_centers_sets_a_zero_variance_group_to_0(steps):
    varies_by_rounding = [[0.3], [np.float32(0.3)]]
    batch = Batch.of([*varies_by_rounding, [1.0], [0.0]], list("aabb"))

    advantages = composed(*steps)(batch).advantages

    assert advantages[:2].tolist() == [0, 0]
    assert (advantages[2:] != 0).all()
    assert findings_at_start_up(*steps, **X) == []


def test_a_state_that_cannot_be_saved_is_rejected_at_the_first_batch():
    steps = [*SUMMED, f"{OWN}:ByLength"]
    assert findings_at_start_up(*steps) == []
    with pytest.raises(CheckpointError, match=facts("'by_length'", "JSON")):
        call("compose", [1.0, 0.0, 1.0, 1.0], list("aabb"), config={"compose": {"steps": steps}})


CLIPPED_BY_MINE = "[weighted_sum,center,{step:mine:Clip,limit:0.5}]"


@pytest.fixture
def dump_of_custom_step(tmp_path, monkeypatch):
    """Return the dump of a run with a step from the file `mine.py`, which is no longer imported."""
    (tmp_path / "mine.py").write_text(Path(custom_steps.__file__).read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    steps = ["weighted_sum", "center", {"step": "mine:Clip", "limit": 0.5}]
    folder, _ = write_dump(tmp_path / "dump", [1], name="compose", algorithm={"compose": {"steps": steps}})
    del sys.modules["mine"]
    yield folder
    sys.modules.pop("mine", None)


@pytest.fixture
def compare(capsys):
    """Return a function that calls `compare` and returns its output."""
    return partial(run_command, capsys, "compare")


def test_compare_imports_no_custom_step_that_only_the_dump_names(dump_of_custom_step, compare):
    assert "compose" in compare(dump_of_custom_step, "gdpo", KEYS)
    assert a_line_says(compare(dump_of_custom_step, "compose", status=1), "algorithm.compose.steps")
    assert "mine" not in sys.modules


@pytest.mark.parametrize(
    "arguments", [[CLIPPED_BY_MINE], ["compose", f"algorithm.compose.steps={CLIPPED_BY_MINE}"]], ids=["list", "setting"]
)
def test_compare_imports_a_custom_step_that_the_command_line_names(dump_of_custom_step, compare, arguments):
    assert a_line_says(compare(dump_of_custom_step, *arguments), "equal", "recorded")
    assert "mine" in sys.modules


def test_compare_reads_a_dump_whose_custom_step_no_longer_exists(dump_of_custom_step, compare, tmp_path):
    (tmp_path / "mine.py").unlink()
    assert a_line_says(compare(dump_of_custom_step, "gdpo", KEYS), "gdpo")
