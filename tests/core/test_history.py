"""HA-DW's anchor over several batches, by hand."""

import math

import numpy as np
import pytest

from tests.facts import facts
from verl_ext.core.batch import Batch
from verl_ext.core.history import WeightByHistory
from verl_ext.core.schema import parse_dataclass
from verl_ext.errors import CheckpointError, ConfigurationError
from verl_ext.methods.hadw import HadwSettings


def batch(*levels: float) -> Batch:
    """One prompt a level, two responses each with that mean accuracy."""
    uids = [prompt for prompt in range(len(levels)) for _ in range(2)]
    return Batch.of([[0.0]] * len(uids), uids, accuracy=[level for level in levels for _ in range(2)])


def test_a_shorter_window_has_an_effect_in_the_first_batch_after_a_resume():
    """Of 0, 0.5, 0.75 only the last two count: population std 0.125, eta_t = 0.8 * 0.125 = 0.1."""
    state = {"anchor": "soft", "value": 0.75, "window": [0.0, 0.5, 0.75], "updates": 3}
    result = WeightByHistory(eta=0.8, eta_min=0.0, history_window=2).transform(np.ones((2, 1)), batch(0.5), state)
    assert result.metrics["eta_t"] == pytest.approx(0.1)
    assert result.state["window"] == pytest.approx([0.75, 0.725])  # 0.9 * 0.75 + 0.1 * 0.5


def test_the_weight_depends_on_the_gap_of_the_prompt_and_on_the_sign_of_the_advantage():
    """C = 0.5; prompts of 0.25 (hard) and 1.0 (easy), one response above and one below the mean each.

    The metrics leave out the two responses to a third prompt, whose values are 0.
    """
    step = WeightByHistory("fixed", fixed_anchor=0.5, lambda_scale=1.0)
    values = np.array([[1.0], [-1.0], [1.0], [-1.0], [0.0], [0.0]])
    found = step.transform(values, batch(0.25, 1.0, 0.625), step.init())
    phi = [math.exp(0.25), math.exp(-0.25), math.exp(-0.5), math.exp(0.5)]
    np.testing.assert_allclose(found.values[:, 0], [phi[0], -phi[1], phi[2], -phi[3], 0, 0])
    assert found.metrics["batch_accuracy"] == 0.625
    assert found.metrics["reweighting_mean"] == pytest.approx(np.mean(phi))
    assert found.metrics["reweighting_std"] == pytest.approx(np.std(phi))


SOUND = {"anchor": "soft", "value": 0.5, "window": [0.25, 0.5], "updates": 2}


def test_a_sound_state_is_accepted():
    for more in ({}, {"value": None, "window": [], "updates": 0}, {"value": 1, "window": [0, 1]}):
        WeightByHistory().check_state(SOUND | more)
    WeightByHistory("window").check_state(SOUND | {"anchor": "window", "value": 0.375})
    for updates in (0, 2**53):
        WeightByHistory("fixed", fixed_anchor=0.3).check_state(
            SOUND | {"anchor": "fixed", "window": [], "updates": updates}
        )


def test_a_state_of_another_anchor_is_rejected():
    for check in (
        WeightByHistory("window").check_state,
        lambda state: WeightByHistory("window").transform(np.ones((2, 1)), batch(1.0), state),
    ):
        with pytest.raises(CheckpointError, match=facts("anchor=window", "algorithm.hadw.anchor=soft")):
            check(SOUND)


@pytest.mark.parametrize(
    "wrong",
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
        {"updates": 10**400},
        {"more": 1},
        {"anchor": "fixed", "value": None, "window": []},
        {"anchor": "fixed", "window": [], "updates": -1},
    ],
)
def test_a_damaged_state_is_rejected(wrong):
    state = SOUND | wrong
    step = WeightByHistory(state["anchor"])
    with pytest.raises(CheckpointError, match="damaged"):
        step.check_state(state)


def test_the_soft_anchor_moves_by_eta_times_sigma():
    """eta 0.5, eta_min 0, y = 0, 1, 1, 1.

    C0 = 0. One posterior: sigma = 1, eta_1 = 0.5, C1 = 0.5. Posteriors 0, 0.5: population std 0.25, eta_2 = 0.125,
    C2 = 0.875 * 0.5 + 0.125 = 0.5625. Posteriors 0, 0.5, 0.5625: mean 0.354167, std 0.251729, eta_3 = 0.125865,
    C3 = 0.5625 + 0.125865 * 0.4375 = 0.617566.
    """
    step = WeightByHistory(eta=0.5, eta_min=0.0)
    state, results = step.init(), []
    for y in (0.0, 1.0, 1.0, 1.0):
        results.append(step.transform(np.ones((2, 1)), batch(y), state))
        state = results[-1].state
    assert [r.state["value"] for r in results] == pytest.approx([0, 0.5, 0.5625, 0.617566], abs=1e-6)
    assert [r.metrics["eta_t"] for r in results] == pytest.approx([1, 0.5, 0.125, 0.125865], abs=1e-6)
    assert [r.metrics["capability_prior"] for r in results] == pytest.approx([0, 0, 0.5, 0.5625], abs=1e-6)
    assert [r.metrics["capability_posterior"] for r in results] == pytest.approx([0, 0.5, 0.5625, 0.617566], abs=1e-6)
    assert [r.metrics["batch_accuracy"] for r in results] == [0, 1, 1, 1]
    assert [r.metrics["updates"] for r in results] == [1, 2, 3, 4]


@pytest.mark.parametrize("anchor", ["soft", "window", "fixed"])
def test_a_batch_without_a_scored_accuracy_does_not_change_the_anchor(anchor):
    step = WeightByHistory(anchor)
    state = {"anchor": anchor, "value": 0.5, "window": [] if anchor == "fixed" else [0.5], "updates": 1}
    result = step.transform(np.ones((2, 1)), batch(math.nan), state)
    assert result.state == state
    assert result.values.tolist() == [[1], [1]]
    assert not result.metrics


@pytest.mark.parametrize(
    ("given", "unused"),
    [
        ({"anchor": "window", "eta": 0.5}, ("eta=0.5", "anchor=window", "anchor=soft")),
        ({"anchor": "fixed", "history_window": 3}, ("history_window=3", "anchor=soft or anchor=window")),
        ({"fixed_anchor": 0.4}, ("fixed_anchor=0.4", "anchor=soft", "anchor=fixed")),
    ],
)
def test_a_setting_that_the_anchor_does_not_use_is_rejected(given, unused):
    with pytest.raises(ConfigurationError, match=facts(*unused)):
        parse_dataclass(HadwSettings, given, "here")
    assert (
        parse_dataclass(HadwSettings, {"anchor": "window", "eta": 0.1}, "here").eta == 0.1
    )  # its default changes nothing
