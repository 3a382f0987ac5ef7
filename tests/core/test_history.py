"""The anchor of HA-DW over several batches, by hand, and the states that it rejects."""

import math

import numpy as np
import pytest

from tests.facts import facts
from verl_ext.core.batch import Batch
from verl_ext.core.chain import StepResult
from verl_ext.core.post_sum import WeightByHistory
from verl_ext.core.schema import parse_dataclass
from verl_ext.errors import CheckpointError, ConfigurationError
from verl_ext.methods.hadw import HadwSettings


def batch_of_accuracies(*accuracies: float) -> Batch:
    """Return one prompt with two responses for each mean accuracy."""
    accuracy_of_response = np.repeat(accuracies, 2)
    prompt_of_response = np.repeat(np.arange(len(accuracies)), 2)
    rewards = np.zeros((len(accuracy_of_response), 1))
    return Batch.of(rewards, prompt_of_response.tolist(), accuracy=accuracy_of_response)


def result_of_one_prompt(step: WeightByHistory, accuracy: float, state) -> StepResult:
    """Return the result of the step on two responses to one prompt, both with the value 1."""
    return step.transform(np.ones((2, 1)), batch_of_accuracies(accuracy), state)


def test_a_shorter_window_takes_effect_right_after_a_resume():
    """Only the last two of 0, 0.5 and 0.75 count. Their standard deviation (n) is 0.125, so eta_t = 0.8 * 0.125."""
    step = WeightByHistory(eta=0.8, eta_min=0.0, history_window=2)
    state = {"anchor": "soft", "value": 0.75, "window": [0.0, 0.5, 0.75], "updates": 3}

    result = result_of_one_prompt(step, 0.5, state)

    assert result.metrics["eta_t"] == pytest.approx(0.1)
    assert result.state["window"] == pytest.approx([0.75, 0.9 * 0.75 + 0.1 * 0.5])


def test_the_weight_depends_on_the_gap_and_the_sign_of_the_advantage():
    """The anchor is 0.5. The prompts have the accuracies 0.25 (hard) and 1.0 (easy), so the gaps are -0.25 and 0.5.

    The metrics leave out the two responses to the third prompt, whose values are 0.
    """
    step = WeightByHistory("fixed", fixed_anchor=0.5, lambda_scale=1.0)
    values = np.array([[1.0], [-1.0], [1.0], [-1.0], [0.0], [0.0]])

    result = step.transform(values, batch_of_accuracies(0.25, 1.0, 0.625), step.init())

    weights = np.exp([0.25, -0.25, -0.5, 0.5])
    np.testing.assert_allclose(result.values[:4, 0], weights * [1, -1, 1, -1])
    assert result.values[4:, 0].tolist() == [0, 0]
    assert result.metrics["batch_accuracy"] == 0.625
    assert result.metrics["reweighting_mean"] == pytest.approx(np.mean(weights))
    assert result.metrics["reweighting_std"] == pytest.approx(np.std(weights))


VALID_STATE = {"anchor": "soft", "value": 0.5, "window": [0.25, 0.5], "updates": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"value": None, "window": [], "updates": 0},
        {"value": 1, "window": [0, 1]},
        {"anchor": "window", "value": 0.375},
        {"anchor": "fixed", "window": [], "updates": 0},
        {"anchor": "fixed", "window": [], "updates": 2**53},
    ],
    ids=str,
)
def test_a_valid_state_is_accepted(changes):
    state = VALID_STATE | changes
    step = WeightByHistory(state["anchor"])
    step.check_state(state)


def test_the_check_of_a_state_rejects_the_state_of_another_anchor():
    with pytest.raises(CheckpointError, match=facts("anchor=window", "algorithm.hadw.anchor=soft")):
        WeightByHistory("window").check_state(VALID_STATE)


def test_a_step_rejects_the_state_of_another_anchor():
    with pytest.raises(CheckpointError, match=facts("anchor=window", "algorithm.hadw.anchor=soft")):
        result_of_one_prompt(WeightByHistory("window"), 1.0, VALID_STATE)


@pytest.mark.parametrize(
    "changes",
    [
        {"value": 1.5},
        {"value": -0.1},
        {"value": None},
        {"value": "0.5"},
        {"window": [2.0, 0.5]},
        {"window": "0.5"},
        {"window": []},
        {"updates": 2.0},
        {"updates": 1},
        {"updates": 2**53 + 1},
        pytest.param({"updates": 10**400}, id="too many updates for a float"),
        {"more": 1},
        {"anchor": "fixed", "value": None, "window": []},
        {"anchor": "fixed", "window": [], "updates": -1},
    ],
    ids=str,
)
def test_a_damaged_state_is_rejected(changes):
    state = VALID_STATE | changes
    step = WeightByHistory(state["anchor"])
    with pytest.raises(CheckpointError, match="damaged"):
        step.check_state(state)


def test_the_soft_anchor_moves_by_eta_times_sigma():
    """The accuracies of the batches are 0, 1, 1, 1, with eta = 0.5 and eta_min = 0.

    C0 = 0. One posterior: sigma = 1, eta_1 = 0.5, C1 = 0.5. Posteriors 0, 0.5: population std 0.25, eta_2 = 0.125,
    C2 = 0.875 * 0.5 + 0.125 = 0.5625. Posteriors 0, 0.5, 0.5625: mean 0.354167, std 0.251729, eta_3 = 0.125865,
    C3 = 0.5625 + 0.125865 * 0.4375 = 0.617566.
    """
    step = WeightByHistory(eta=0.5, eta_min=0.0)
    state = step.init()
    results = []
    for accuracy in (0.0, 1.0, 1.0, 1.0):
        result = result_of_one_prompt(step, accuracy, state)
        results.append(result)
        state = result.state

    def logged(metric: str) -> list[float]:
        return [result.metrics[metric] for result in results]

    anchors = [0, 0.5, 0.5625, 0.617566]
    assert [result.state["value"] for result in results] == pytest.approx(anchors, abs=1e-6)
    assert logged("eta_t") == pytest.approx([1, 0.5, 0.125, 0.125865], abs=1e-6)
    assert logged("capability_prior") == pytest.approx([0, 0, 0.5, 0.5625], abs=1e-6)
    assert logged("capability_posterior") == pytest.approx(anchors, abs=1e-6)
    assert logged("batch_accuracy") == [0, 1, 1, 1]
    assert logged("updates") == [1, 2, 3, 4]


@pytest.mark.parametrize(("anchor", "window"), [("soft", [0.5]), ("window", [0.5]), ("fixed", [])])
def test_a_batch_without_a_scored_accuracy_does_not_change_the_anchor(anchor, window):
    state = {"anchor": anchor, "value": 0.5, "window": window, "updates": 1}
    result = result_of_one_prompt(WeightByHistory(anchor), math.nan, state)
    assert result.state == state
    assert result.values.tolist() == [[1], [1]]
    assert not result.metrics


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"anchor": "window", "eta": 0.5}, ("eta=0.5", "anchor=window", "anchor=soft")),
        ({"anchor": "fixed", "history_window": 3}, ("history_window=3", "anchor=soft or anchor=window")),
        ({"fixed_anchor": 0.4}, ("fixed_anchor=0.4", "anchor=soft", "anchor=fixed")),
    ],
    ids=["eta", "history_window", "fixed_anchor"],
)
def test_a_setting_that_the_anchor_does_not_use_is_rejected(settings, words):
    with pytest.raises(ConfigurationError, match=facts(*words)):
        parse_dataclass(HadwSettings, settings, "here")


def test_a_setting_that_the_anchor_does_not_use_may_have_its_default():
    settings = parse_dataclass(HadwSettings, {"anchor": "window", "eta": 0.1}, "here")
    assert settings.eta == 0.1
