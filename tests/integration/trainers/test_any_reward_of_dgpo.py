"""The group filter `any_reward` with dgpo, whose sum of the rewards depends on `algorithm.use_kl_in_reward`."""

import pytest

from verl_ext import Batch, Settings, build
from verl_ext.advantages.group_filter import any_reward


@pytest.mark.parametrize("kl_in_reward", [False, True])
def test_a_group_whose_rewards_cancel_is_dropped(kl_in_reward: bool) -> None:
    """In group a both rewards vary, but each sum is 1. In group b the sums are 1 and 2."""
    chain = build("dgpo", Settings.parse({"use_kl_in_reward": kl_in_reward}))
    batch = Batch.of([[1, 0], [0, 1], [1, 0], [1, 1]], list("aabb"), keys=("x", "y"))
    assert any_reward(batch, chain).tolist() == [False, True]
