"""Custom steps in a list, and the dry run of a list on synthetic batches."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.calls import call
from tests.estimators.test_compose import SUMMED, composed, findings_at_start_up
from tests.facts import a_line_says, facts, says
from tests.integration import own_steps
from tests.tools import made
from verl_ext import Batch
from verl_ext.errors import CheckpointError, ConfigurationError

OWN = "tests.integration.own_steps"
BATCH = Batch.of([[1.0, 3.0], [0.0, 1.0], [2.0, 0.0], [5.0, 0.0]], list("aabb"), keys=("x", "y"))
XY = {"rewards": {"keys": ["x", "y"]}}


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"step": f"{OWN}:Clip", "limit": 0}, (f"{OWN}:Clip.limit", "above 0", "found 0")),
        ("raises_at_import:Step", ("'raises_at_import:Step'", "RuntimeError: on purpose")),
        (f"{OWN}:Nameless", (f"'{OWN}:Nameless'", "verl_ext.Step")),
    ],
)
def test_a_custom_step_that_cannot_be_used_is_rejected_with_the_cause(step, words, tmp_path, monkeypatch):
    (tmp_path / "raises_at_import.py").write_text('raise RuntimeError("on purpose")')
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match=facts("algorithm.compose.steps[2]", *words)):
        composed(*SUMMED, step)


INVALID_STEPS = """
from dataclasses import dataclass
from verl_ext import Step, WeightedSum

@dataclass(frozen=True)
class Scaled(WeightedSum):
    name = "scaled"
    compares: bool = True
"""


def test_a_list_with_an_invalid_class_of_a_step_is_rejected(tmp_path, monkeypatch):
    (tmp_path / "invalid_steps.py").write_text(INVALID_STEPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "invalid_steps", raising=False)
    with pytest.raises(ConfigurationError, match=facts("algorithm.compose.steps[0]", "step Scaled", "'compares'")):
        composed("invalid_steps:Scaled", "center")


def test_a_custom_step_may_center():
    chain = composed("weighted_sum", f"{OWN}:Middle", "scale_by_mad", "weight_by_history", **XY)
    assert [step.name for step in chain.steps][1] == "middle"
    steps = ["weighted_sum", f"{OWN}:Middle", "divide_by_batch_std"]
    assert findings_at_start_up(*steps, **XY) == []


def test_a_custom_step_may_occur_twice_unless_it_has_a_state():
    clip = f"{OWN}:Clip"
    assert len(composed("weighted_sum", clip, "center", clip).steps) == 4
    with pytest.raises(ConfigurationError, match=facts("'slower'", "more than once")):
        composed(*SUMMED, f"{OWN}:Slower", f"{OWN}:Slower")


def test_a_custom_step_may_sum_the_rewards():
    chain = composed(f"{OWN}:Lowest", "center", **XY)
    assert chain(BATCH).advantages.tolist() == [0.5, -0.5, 0, 0]  # least: 1 0 | 0 0
    assert not chain.per_reward
    with pytest.raises(ConfigurationError, match=facts("weighted_sum", "found 2")):
        composed("weighted_sum", f"{OWN}:Lowest", "center", **XY)
    with pytest.raises(
        ConfigurationError, match=facts("drop_conflicts must come before the sum", "drop_conflicts before lowest")
    ):
        composed("center", f"{OWN}:Lowest", "drop_conflicts", **XY)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([*SUMMED, f"{OWN}:Broken"], ("fails in line", "KeyError", "own_steps.py", "Remove the step")),
        ([*SUMMED, f"{OWN}:Infinite"], ("not finite",)),
        ([*SUMMED, f"{OWN}:Pair"], ("'pair'", "[1, 2]")),
        ([f"{OWN}:Least", *SUMMED], ("'least'", "(28, 1)", "(28, 2)")),
        ([*SUMMED, f"{OWN}:Signs"], ("algorithm.rewards.weights", "no effect")),
        (["whiten", *SUMMED], ("found 2", "weighted_sum")),
        ([f"{OWN}:Lowest", "center"], ("algorithm.rewards.weights", "no effect")),
        (["soft_min", "center"], ("algorithm.rewards.weights", "no effect")),
        ([*SUMMED, "divide_by_mean"], ("divide_by_mean", "at least 0", "center")),
    ],
)
@pytest.mark.filterwarnings("error")
def test_a_list_that_fails_on_synthetic_batches_is_rejected(steps, words):
    first, *others = findings_at_start_up(*steps, rewards=XY["rewards"] | {"weights": [1.0, 1.0]})
    assert first.severity == "error"
    assert says(first, *words)
    assert {finding.severity for finding in others} <= {"warning"}  # a custom step may hide the effect of a step


@pytest.mark.parametrize("weights", [None, [1.0, 2.0], [1.0, 0.0]])
def test_a_valid_list_with_custom_steps_has_no_findings(weights):
    rewards = {"keys": ["x", "y"], "weights": weights}
    for steps in (
        [*SUMMED, f"{OWN}:Slower"],
        [*SUMMED, "weight_by_difficulty", "weight_by_history"],
        ["center", f"{OWN}:Clip", "weighted_sum", "whiten"],
    ):
        assert findings_at_start_up(*steps, rewards=rewards) == []
    weighting = {"step": "weight_by_variation", "min_values": [1.0, -3.0]}
    assert findings_at_start_up(weighting, *SUMMED, rewards=rewards) == []
    (finding,) = findings_at_start_up(weighting | {"min_values": [1.0]}, *SUMMED, rewards=rewards)
    assert says(finding, "min_values", "2 numbers")


def test_a_list_with_a_step_that_reads_fields_of_verls_batch_is_not_computed_before_the_run():
    """A synthetic batch has no such fields."""
    steps = [*SUMMED, f"{OWN}:BySource"]
    assert composed(*steps).needs_fields == ("data_source",)
    assert findings_at_start_up(*steps) == []
    assert findings_at_start_up("center", f"{OWN}:BySource", *SUMMED, **XY) == []  # may need the second center


def test_a_group_that_varies_by_rounding_is_exactly_0_after_a_custom_step_that_centers():
    batch = Batch.of([[0.3], [np.float32(0.3)], [1.0], [0.0]], list("aabb"))
    for steps in (["weighted_sum", f"{OWN}:Middle"], [f"{OWN}:Middle", "scale_by_std", "weighted_sum"]):
        assert findings_at_start_up(*steps, rewards={"keys": ["x"]}) == []
        assert (composed(*steps)(batch).advantages != 0).tolist() == [False, False, True, True]


def test_a_state_that_cannot_be_saved_is_rejected_at_the_first_batch():
    steps = [*SUMMED, f"{OWN}:ByLength"]
    assert findings_at_start_up(*steps) == []
    with pytest.raises(CheckpointError, match=facts("'by_length'", "JSON")):
        call("compose", [1.0, 0.0, 1.0, 1.0], list("aabb"), config={"compose": {"steps": steps}})


def test_compare_imports_a_custom_step_only_if_the_command_line_names_it(capsys, tmp_path, monkeypatch):
    compare = partial(made.call, capsys, "compare")
    (tmp_path / "mine.py").write_text(Path(own_steps.__file__).read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    steps = ["weighted_sum", "center", {"step": "mine:Clip", "limit": 0.5}]
    folder, _ = made.dump(tmp_path / "dump", [1], name="compose", algorithm={"compose": {"steps": steps}})
    named = "[weighted_sum,center,{step:mine:Clip,limit:0.5}]"
    del sys.modules["mine"]
    assert "compose" in compare(folder, "gdpo", made.KEYS)
    assert a_line_says(compare(folder, "compose", status=1), "algorithm.compose.steps")
    assert "mine" not in sys.modules
    for arguments in ([named], ["compose", f"algorithm.compose.steps={named}"]):
        assert a_line_says(compare(folder, *arguments), "equal", "recorded")
    del sys.modules["mine"]
    (tmp_path / "mine.py").unlink()
    assert a_line_says(compare(folder, "gdpo", made.KEYS), "gdpo")
