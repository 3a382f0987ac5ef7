"""Steps of the user's own in a list, and the trial of an estimator on a made-up batch."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from verl_ext.checks.trial import try_out

from tests.calls import call
from tests.estimators.test_compose import SUMMED, composed
from tests.facts import a_line_says, facts, says
from tests.integration import own_steps
from tests.tools import made
from verl_ext import Batch, Settings
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
def test_a_step_that_cannot_be_used_is_named_with_the_cause(step, words, tmp_path, monkeypatch):
    (tmp_path / "raises_at_import.py").write_text('raise RuntimeError("on purpose")')
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match=facts("algorithm.compose.steps[2]", *words)):
        composed(*SUMMED, step)


def test_a_step_of_one_s_own_may_be_the_centering():
    chain = composed("weighted_sum", f"{OWN}:Middle", "scale_by_mad", "weight_by_history", **XY)
    assert [step.name for step in chain.steps][1] == "middle"
    with pytest.raises(ConfigurationError, match=facts("divide_by_batch_std must not come after center")):
        composed("weighted_sum", f"{OWN}:Middle", "divide_by_batch_std", **XY)


def test_a_step_of_one_s_own_may_be_the_sum():
    chain = composed(f"{OWN}:Lowest", "center", **XY)
    assert chain(BATCH).advantages.tolist() == [0.5, -0.5, 0, 0]  # least: 1 0 | 0 0
    assert not chain.per_reward
    with pytest.raises(ConfigurationError, match=facts("weighted_sum", "found 2")):
        composed("weighted_sum", f"{OWN}:Lowest", "center", **XY)
    with pytest.raises(ConfigurationError, match=facts("drop_conflicts must not come after weighted_sum")):
        composed("center", f"{OWN}:Lowest", "drop_conflicts", **XY)


def trial(*steps, **algorithm):
    settings = Settings.parse({"compose": {"steps": list(steps)}} | algorithm)
    return next(try_out("compose", settings), None)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([*SUMMED, f"{OWN}:Broken"], ("KeyError", "own_steps.py")),
        ([*SUMMED, f"{OWN}:Infinite"], ("not finite",)),
        ([*SUMMED, f"{OWN}:Pair"], ("'pair'", "[1, 2]")),
        ([f"{OWN}:Least", *SUMMED], ("'least'", "(12, 1)", "(12, 2)")),
        ([*SUMMED, f"{OWN}:Signs"], ("algorithm.rewards.weights", "no effect")),
        (["whiten", *SUMMED], ("found 2", "weighted_sum")),
        ([f"{OWN}:Lowest", f"{OWN}:BySource", "center"], ("algorithm.rewards.weights", "no effect")),
        ([*SUMMED, "divide_by_mean"], ("divide_by_mean", "at least 0", "center")),
    ],
)
def test_what_does_not_hold_is_found_on_a_made_up_batch(steps, words):
    assert says(trial(*steps, rewards=XY["rewards"] | {"weights": [1.0, 1.0]}), *words)


@pytest.mark.parametrize("weights", [None, [1.0, 2.0], [1.0, 0.0]])
def test_a_list_that_holds_passes_the_made_up_batch(weights):
    rewards = {"keys": ["x", "y"], "weights": weights}
    for steps in (
        [*SUMMED, f"{OWN}:Slower"],
        [*SUMMED, "weight_by_difficulty", "weight_by_history"],
        ["center", f"{OWN}:Clip", "weighted_sum", "whiten"],
    ):
        assert trial(*steps, rewards=rewards) is None
    weighing = {"step": "weight_by_variation", "min_values": [1.0, -3.0]}
    assert trial(weighing, *SUMMED, rewards=rewards) is None
    assert says(trial(weighing | {"min_values": [1.0]}, *SUMMED, rewards=rewards), "min_values", "2 numbers")
    assert trial(*SUMMED, f"{OWN}:Signs") is None  # one reward: no weights to lose


def test_what_rounding_leaves_after_a_step_that_centers_is_exactly_0():
    batch = Batch.of([[0.3], [np.float32(0.3)], [1.0], [0.0]], list("aabb"))
    for steps in (["weighted_sum", f"{OWN}:Middle"], [f"{OWN}:Middle", "scale_by_std", "weighted_sum"]):
        assert trial(*steps) is None
        assert (composed(*steps)(batch).advantages != 0).tolist() == [False, False, True, True]


def test_a_state_that_cannot_be_saved_is_refused_at_the_first_batch():
    steps = [*SUMMED, f"{OWN}:ByLength"]
    assert trial(*steps) is None
    with pytest.raises(CheckpointError, match=facts("'by_length'", "JSON")):
        call("compose", [1.0, 0.0, 1.0, 1.0], list("aabb"), config={"compose": {"steps": steps}})


def test_only_the_command_line_says_what_code_compare_imports(capsys, tmp_path, monkeypatch):
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
