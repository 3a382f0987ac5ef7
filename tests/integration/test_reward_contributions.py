"""`advantage/contribution/<key>`: how much each reward contributes to the advantages."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.batches import rollouts
from tests.calls import metrics_of
from verl_ext import Settings, build
from verl_ext.core.metrics import contribution_metrics

PREFIX = "advantage/contribution/"
WEIGHTS = (2.0, -0.5)
LARGE, SMALL, GROUP = [3.0, 3.0, -3.0, -3.0], [1.0, 0.0, 1.0, 0.0], ["g"] * 4


def weighted_rewards(rewards):
    """Return each reward of a response with its weight. A reward that is not scored contributes 0."""
    weighted = []
    for weight, reward in zip(WEIGHTS, rewards, strict=True):
        weighted.append(0.0 if math.isnan(reward) else weight * reward)
    return weighted


def expected_contributions(rollout, kl_terms, *, norm):
    """Compute the contributions of `a`, `b` and the rest with plain loops. The list is empty without variance."""
    sums = reference.weighted_total([*rollout.columns.values()], WEIGHTS)
    totals = [total + kl for total, kl in zip(sums, kl_terms, strict=True)]
    advantages = reference.grpo(totals, rollout.uids, norm_by_std=norm)
    parts = [weighted_rewards(rewards) for rewards in rollout.rewards]
    return reference.shares(parts, totals, advantages, rollout.uids)


@given(rollout=rollouts(), norm=st.booleans(), with_kl=st.booleans())
def test_contributions_equal_plain_loops_and_sum_to_1(rollout, norm, with_kl):
    kl_terms = [length / 64 if with_kl else 0.0 for length in rollout.lengths]
    batch = rollout.batch(kl_reward=kl_terms if with_kl else None)
    settings = Settings.parse({"rewards": {"keys": ["a", "b"], "weights": WEIGHTS}, "norm_adv_by_std_in_grpo": norm})
    result = build("grpo", settings)(batch)
    contributions = contribution_metrics(
        batch.keys, batch.groups, result.contributions, result.total, result.advantages, rest=with_kl
    )

    values = expected_contributions(rollout, kl_terms, norm=norm)
    names = ["a", "b", "rest"] if with_kl else ["a", "b"]
    expected = {PREFIX + name: value for name, value in zip(names, values, strict=False)}
    assert contributions == pytest.approx(expected, abs=1e-9)
    assert sum(contributions.values()) == pytest.approx(1 if values else 0)


def logged_contributions(name, components, **config):
    """Return the contributions that a run with these rewards of one group logs, by key."""
    config["rewards"] = {"keys": list(components)}
    metrics = metrics_of(name, [0.0] * 4, GROUP, components=components, config=config)
    contributions = {}
    for metric, value in metrics.items():
        if metric.startswith(PREFIX):
            contributions[metric.removeprefix(PREFIX)] = value
    return contributions


def test_a_large_reward_dominates_the_sum_but_not_gdpo():
    rewards = {"large": LARGE, "small": SMALL}
    assert logged_contributions("drgrpo", rewards) == pytest.approx({"large": 36 / 37, "small": 1 / 37})
    assert logged_contributions("gdpo", rewards) == pytest.approx({"large": 0.5, "small": 0.5})


def test_a_sum_without_variance_has_no_contributions():
    assert logged_contributions("gdpo", {"a": LARGE, "b": [-value for value in LARGE]}) == {}


def test_a_custom_sum_has_no_contributions():
    steps = ["tests.integration.custom_steps:Lowest", "center"]
    assert logged_contributions("compose", {"a": LARGE, "b": SMALL}, compose={"steps": steps}) == {}


def test_a_single_reward_has_no_contribution():
    assert logged_contributions("drgrpo", {"a": LARGE}) == {}
