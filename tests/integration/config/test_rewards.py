"""Our reward functions' arguments, refused before training whatever the estimator."""

from __future__ import annotations

import pytest

import verl_ext.rewards.gsm8k
from tests.integration.configs import compose
from verl_ext.errors import ConfigurationError
from verl_ext.integration.config.checks import check_run

PATH = "reward.custom_reward_function.path"
KWARGS = "+reward.custom_reward_function.reward_kwargs"

REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "an argument that does not exist": (
        (f"{PATH}=pkg://verl_ext.rewards.tool_calling", f"{KWARGS}.maching=optimal"),
        "reward_kwargs: unknown setting 'maching' (did you mean 'matching'?); valid: ",
    ),
    "a value that does not exist": (
        (f"{PATH}=pkg://verl_ext/rewards/gsm8k", f"{KWARGS}.strict=yes"),
        "reward_kwargs.strict: unknown value 'yes'; valid: 'corrected', 'reference'",
    ),
    "a value out of range, of a module named by its file": (
        (f"{PATH}={verl_ext.rewards.gsm8k.__file__.replace('gsm8k', 'boxed_math')}", f"{KWARGS}.timeout=0"),
        "reward_kwargs.timeout must be above 0",
    ),
    "arguments that are no section": (
        (f"{PATH}=pkg://verl_ext.rewards.gsm8k", f"{KWARGS}=reference"),
        "reward_kwargs must be a section of settings, found 'reference'",
    ),
    "a module that does not exist": (
        (f"{PATH}=pkg://verl_ext.rewards.gsm8",),
        "unknown reward module 'verl_ext.rewards.gsm8' (did you mean 'verl_ext.rewards.gsm8k'?); valid: ",
    ),
    "a module that scores nothing": (
        (f"{PATH}=pkg://verl_ext.rewards.tags",),
        "valid: 'verl_ext.rewards.boxed_math', 'verl_ext.rewards.gsm8k', 'verl_ext.rewards.tool_calling'",
    ),
    "a function that does not exist": (
        (f"{PATH}=pkg://verl_ext.rewards.gsm8k", "reward.custom_reward_function.name=score"),
        "set reward.custom_reward_function.name=compute_score",
    ),
}


@pytest.mark.parametrize("estimator", ["grpo", "hadw"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_argument_is_refused_at_start_up(case: str, estimator: str) -> None:
    overrides, part = REFUSED[case]
    with pytest.raises(ConfigurationError) as caught:
        check_run(compose(f"algorithm.adv_estimator={estimator}", *overrides))
    assert part in str(caught.value)
    assert str(caught.value).count("\n  - ") == 1


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (f"{PATH}=pkg://verl_ext.rewards.gsm8k", f"{KWARGS}.strict=reference"),
        (f"{PATH}=pkg://verl_ext.rewards.tool_calling", f"{KWARGS}={{matching: optimal, length: fixed}}"),
        # Another's reward functions are not ours to judge, nor whether they exist.
        (f"{PATH}=pkg://somebody.rewards", f"{KWARGS}.maching=optimal"),
        (f"{PATH}=/nowhere/gsm8k.py", f"{KWARGS}.strict=yes"),
        (f"{PATH}=pkg://verl_ext_of_mine.rewards", f"{KWARGS}.strict=yes"),
    ],
)
def test_what_is_right_or_not_ours_is_left_alone(overrides: tuple[str, ...]) -> None:
    check_run(compose("algorithm.adv_estimator=grpo", *overrides))
