"""The setting `algorithm.gdpo.epsilon` is rejected if no divisor of the estimator uses it."""

import pytest

from tests.facts import facts
from verl_ext import Settings, build
from verl_ext.errors import ConfigurationError


@pytest.mark.parametrize(
    ("scale", "whiten", "divides_by_std", "reason"),
    [
        ("none", "none", True, "algorithm.gdpo.scale=none"),
        ("none", "token", True, "algorithm.gdpo.scale=none"),
        ("std", "token", False, "algorithm.norm_adv_by_std_in_grpo=False"),
        ("std", "none", False, "algorithm.norm_adv_by_std_in_grpo=False"),
    ],
)
def test_epsilon_without_a_divisor_is_rejected(scale: str, whiten: str, divides_by_std: bool, reason: str) -> None:
    algorithm = {
        "gdpo": {"scale": scale, "whiten": whiten, "epsilon": 0.1},
        "norm_adv_by_std_in_grpo": divides_by_std,
    }
    with pytest.raises(ConfigurationError, match=facts("algorithm.gdpo.epsilon=0.1", "no effect", reason)):
        build("gdpo", Settings.parse(algorithm))


@pytest.mark.parametrize(
    ("scale", "whiten", "divides_by_std", "step_with_epsilon"),
    [
        ("none", "sequence", True, "whiten"),
        ("std", "none", True, "scale_by_std"),
        ("mad", "token", False, "scale_by_mad"),
    ],
)
def test_epsilon_with_a_divisor_is_used(scale: str, whiten: str, divides_by_std: bool, step_with_epsilon: str) -> None:
    algorithm = {
        "gdpo": {"scale": scale, "whiten": whiten, "epsilon": 0.1},
        "norm_adv_by_std_in_grpo": divides_by_std,
    }
    chain = build("gdpo", Settings.parse(algorithm))
    epsilon_of_step = {step.name: step.epsilon for step in chain.steps if hasattr(step, "epsilon")}
    assert epsilon_of_step[step_with_epsilon] == 0.1
