"""Which reward managers are verl's own, so that what they add and read is known."""

import pytest

from tests.configs import compose_quickly
from verl_ext.checks.managers import REWARD_MANAGERS, manager_of_verl
from verl_ext.checks.rewards import known_components
from verl_ext.run_config import select

MANAGER = "reward.reward_manager"
GSM8K = "reward.custom_reward_function.path=pkg://verl_ext.rewards.gsm8k"


def manager_of(*overrides):
    """The reward manager of verl that a run with these overrides has, or None."""
    config = compose_quickly(*overrides)
    return manager_of_verl(lambda path: select(config, path))


@pytest.mark.parametrize("name", REWARD_MANAGERS)
def test_every_manager_of_the_table_is_registered_by_verl(name):
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

    assert get_reward_manager_cls(name) is not None


@pytest.mark.parametrize("name", REWARD_MANAGERS)
def test_a_manager_from_a_file_is_not_the_one_of_verl_with_its_name(name):
    assert manager_of(f"{MANAGER}.name={name}") is REWARD_MANAGERS[name]
    assert manager_of(f"{MANAGER}.name={name}", f"{MANAGER}.source=importlib") is None


def test_the_components_are_known_only_with_a_manager_of_verl():
    with_dapo = known_components(compose_quickly(GSM8K, f"{MANAGER}.name=dapo"))
    assert with_dapo == ["correctness", "integer", "format", "overlong", "overlong_reward", "score"]
    assert known_components(compose_quickly(GSM8K, f"{MANAGER}.name=mine")) is None
