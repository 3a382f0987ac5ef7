"""Which metrics the plot of `report` shows, and their titles and units."""

from dataclasses import dataclass, field

import pytest

from tests.tools.logs import log_of_run, log_of_steps, log_of_values
from verl_ext.tools.report.curves import NOISE, changes, default_panels, title, unit

X = "reward/x/mean"


def test_every_reward_and_what_was_logged_with_it_has_a_panel_with_its_unit(tmp_path):
    panels, omitted = default_panels({"a": [log_of_run(tmp_path / "log.jsonl")]})
    assert omitted == []
    assert [(title(metric), unit(metric)) for metric in panels] == [
        ("correctness", "reward, batch mean"),
        ("correctness: zero-variance groups", "fraction of groups"),
        ("advantage/contribution/correctness", "fraction of the advantage"),
        ("advantage/std", "standard deviation over responses"),
        ("response_length/mean", "tokens, batch mean"),
    ]


@dataclass
class NoiseCase:
    """Two values of a metric, and the values of other metrics."""

    metric: str
    values: tuple[float, float]
    changes: bool
    others: dict[str, float] = field(default_factory=dict)


NOISE_CASES = {
    "rounding of a constant": NoiseCase(X, (0.7, 0.7 + 1e-8), changes=False),
    "a small reward": NoiseCase(X, (1e-9, 2e-9), changes=True),
    "a mean of values that cancel": NoiseCase(X, (1e-16, -2e-16), changes=False, others={"reward/x/std": 1.0}),
    "a small mean of large values": NoiseCase(
        X, (1e-3, -2e-3), changes=True, others={"reward/x/min": -1.0, "reward/x/max": 1.0}
    ),
    "a small change": NoiseCase(X, (0.9961, 0.9962), changes=True),
    "a fraction that is 0 apart from rounding": NoiseCase("advantage/contribution/x", (1e-17, 3e-17), changes=False),
    "a fraction that is small": NoiseCase("advantage/zero_fraction", (0.0, 1e-3), changes=True),
    "the standard deviation of whitened advantages": NoiseCase(
        "advantage/std", (0.98425, 0.98425 + 1e-16), changes=False
    ),
    "a constant": NoiseCase("response_length/mean", (100.0, 100.0), changes=False),
}


@pytest.mark.parametrize("case", NOISE_CASES.values(), ids=NOISE_CASES)
def test_a_metric_that_differs_only_by_floating_point_noise_does_not_change(case, tmp_path):
    log = log_of_values(tmp_path / "a.jsonl", case.metric, case.values, **case.others)
    assert changes({"a": [log]}, case.metric) == case.changes


@pytest.mark.parametrize("case", NOISE_CASES.values(), ids=NOISE_CASES)
def test_two_constant_runs_that_differ_only_by_noise_do_not_change(case, tmp_path):
    first, second = (log_of_values(tmp_path / "b.jsonl", case.metric, [value], **case.others) for value in case.values)
    assert changes({"a": [first], "b": [second]}, case.metric) == case.changes
    assert changes({"a": [first, second]}, case.metric) == case.changes


@pytest.mark.parametrize(("factor", "has_change"), [(0.5, False), (2.0, True)])
def test_the_limit_of_noise_is_relative_to_the_scale(factor, has_change, tmp_path):
    log = log_of_values(tmp_path / "a.jsonl", X, [1e6, 1e6 * (1 + factor * NOISE)])
    assert changes({"a": [log]}, X) == has_change


def test_metrics_that_never_change_are_omitted(tmp_path):
    steps = []
    for step in range(4):
        constant = {"advantage/std": 0.98 + 1e-16 * step, "response_length/mean": 7.0}
        steps.append({X: 0.5 + step, **constant})
    log = log_of_steps(tmp_path / "a.jsonl", steps)
    assert default_panels({"a": [log]}) == ([X], ["advantage/std", "response_length/mean"])


def test_the_rewards_are_drawn_if_nothing_changes(tmp_path):
    log = log_of_steps(tmp_path / "b.jsonl", [{X: 0.5, "advantage/std": 0.98, "response_length/mean": 7.0}])
    assert default_panels({"a": [log]}) == ([X], [])
