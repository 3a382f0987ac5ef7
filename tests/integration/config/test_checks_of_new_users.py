"""Mistakes that would otherwise show after the first rollout, or never."""

from __future__ import annotations

import pytest

from tests.integration.configs import compose
from verl_ext.integration.config.checks import judge

GSM8K, TOOLS, MATHS = (
    f"reward.custom_reward_function.path=pkg://verl_ext.rewards.{name}"
    for name in ("gsm8k", "tool_calling", "boxed_math")
)
KEYS = "algorithm.rewards.keys=[a,b]"


def errors(*overrides: str) -> str:
    return "\n".join(judge(compose(*overrides)).errors)


def warnings(*overrides: str) -> str:
    return "\n".join(judge(compose(*overrides)).warnings)


@pytest.mark.parametrize("estimator", ["gdpo", "drgrpo", "hadw"])
def test_groups_of_one_response_are_warned_of(estimator: str) -> None:
    one = "actor_rollout_ref.rollout.n=1"
    assert one in warnings(f"+verl_ext={estimator}", KEYS, one)
    assert "rollout.n" not in warnings(f"+verl_ext={estimator}", KEYS)


def test_one_response_is_enough_for_a_list_that_centres_no_group() -> None:
    assert "rollout.n" not in warnings(
        "+verl_ext=compose", KEYS, "algorithm.compose.steps=[weigh_and_sum,whiten]", "actor_rollout_ref.rollout.n=1"
    )


@pytest.mark.parametrize(
    ("override", "place"), [("+gdpo.whiten=token", "algorithm.gdpo"), ("+rewards.weights=[1,2]", "algorithm.rewards")]
)
def test_a_section_at_the_top_of_the_configuration_is_refused(override: str, place: str) -> None:
    assert place in errors("+verl_ext=gdpo", KEYS, override)


@pytest.mark.parametrize("override", ["+verlext=gdpo", "+verl_exts=gdpo", "+verl-ext=gdpo"])
def test_a_misspelt_preset_is_refused(override: str) -> None:
    assert "+verl_ext=gdpo" in errors(override)


def test_nothing_at_the_top_of_verl_s_own_configuration_is_taken_for_a_mistake() -> None:
    assert "at the top" not in warnings()
    assert not errors("+verl_ext=[cpu,gdpo]", KEYS)


@pytest.mark.parametrize(
    ("overrides", "valid"),
    [
        ((GSM8K,), "'correctness', 'format', 'integer'"),
        ((TOOLS,), "'format'"),
        ((TOOLS, "algorithm.rewards.accuracy_key=correctness"), "'format'"),
        ((TOOLS, "+reward.custom_reward_function.reward_kwargs.scale=linear"), None),
    ],
)
@pytest.mark.parametrize("estimator", ["dgpo", "hadw"])
def test_a_component_of_ours_that_is_no_accuracy_is_refused(
    estimator: str, overrides: tuple[str, ...], valid: str | None
) -> None:
    found = errors(f"+verl_ext={estimator}", *overrides)
    assert "algorithm.rewards.accuracy_threshold=" in found
    assert ("algorithm.rewards.accuracy_key=" in found) == (valid is not None)
    if valid is not None:
        assert f"({valid})" in found


@pytest.mark.parametrize(
    "overrides",
    [
        ("+verl_ext=dgpo", GSM8K, "algorithm.rewards.accuracy_key=correctness"),
        (
            "+verl_ext=hadw",
            TOOLS,
            "algorithm.rewards.accuracy_key=correctness",
            "algorithm.rewards.accuracy_threshold=0",
        ),
        ("+verl_ext=drgrpo", GSM8K),
        ("+verl_ext=dgpo", "reward.custom_reward_function.path=mine.py"),
    ],
)
def test_an_accuracy_of_ours_a_threshold_and_scorers_of_others_pass(overrides: tuple[str, ...]) -> None:
    assert "accuracy" not in errors(*overrides)


def test_the_score_of_boxed_maths_is_an_accuracy() -> None:
    pytest.importorskip("math_verify")
    assert not errors("+verl_ext=dgpo", MATHS)


def test_a_misspelt_filter_is_refused() -> None:
    filtered = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=any_rewards")
    assert "algorithm.filter_groups.metric=any_reward" in errors("+verl_ext=gdpo", KEYS, *filtered)


def test_a_list_written_without_brackets_is_refused_with_the_brackets() -> None:
    assert "algorithm.rewards.keys=[format]" in errors("+verl_ext=gdpo", "algorithm.rewards.keys=format")
