"""The weights of the rewards: data of the batch, which `algorithm.rewards.weights` sets."""

import numpy as np
import pytest
from hypothesis import given

from tests.batches import rollouts
from tests.estimators.every import EVERY, KEYS, state_of_hadw
from tests.estimators.small import config_for
from tests.facts import facts
from verl_ext import Batch, Settings, Step, build
from verl_ext.core.chain import Chain
from verl_ext.core.steps import Center, WeightedSum
from verl_ext.errors import ConfigurationError
from verl_ext.methods import METHODS

WITHOUT_WEIGHTS = {"rewards": {"keys": KEYS["rewards"]["keys"]}}


@EVERY
@given(rollout=rollouts())
def test_the_setting_has_the_effect_of_the_weights_of_the_batch(name, config, rollout):
    """`build(name, settings)` with weights, and without weights on a batch that has them."""
    state = state_of_hadw(config) if name == "hadw" else None
    batch = rollout.batch()
    with_setting = build(name, Settings.parse(config))(batch, state)
    chain = build(name, Settings.parse(config | WITHOUT_WEIGHTS))
    with_batch_weights = chain(batch.with_weights(KEYS["rewards"]["weights"]), state)
    np.testing.assert_array_equal(with_setting.advantages, with_batch_weights.advantages)
    assert with_setting.metrics == with_batch_weights.metrics
    assert batch.reward_weights.tolist() == [1, 1]


def test_the_weights_of_a_direct_call():
    """By hand: the sums 2 * 1 - 0 and 2 * 0 - 3 of the first group have the mean -0.5."""
    settings = Settings.parse({"rewards": {"keys": ["x", "y"], "weights": [2.0, -1.0]}})
    batch = Batch.of([[1, 0], [0, 3], [1, 1], [1, 1]], list("aabb"), keys=("x", "y"))
    result = build("drgrpo", settings)(batch)
    assert result.advantages.tolist() == [2.5, -2.5, 0, 0]
    contributions, total = result.contributions, result.total
    assert contributions.tolist() == [[2, 0], [0, -3], [2, -1], [2, -1]]
    assert total.tolist() == [2, -3, 1, 1]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_batch_must_have_as_many_rewards_as_there_are_weights(name):
    rewards = {"keys": ["x", "y", "z"], "weights": [1.0, 1.0, 1.0]}
    chain = build(name, Settings.parse(config_for(name, rewards=rewards)))
    batch = Batch.of([[1, 0], [0, 3]], list("aa"), keys=("x", "y"), accuracy=[1, 0])
    with pytest.raises(ConfigurationError, match=facts("3 weights", "2 rewards 'x', 'y'")):
        chain(batch)


def test_a_custom_step_reads_the_weights_from_the_batch():
    class LargestWeighted(Step):
        """The largest weighted reward of a response."""

        name = "largest_weighted"
        sums = True

        def apply(self, values, batch):
            return (values * batch.weights).max(axis=1, keepdims=True)

    batch = Batch.of([[1, 4], [2, 0]], list("aa"), keys=("x", "y"))
    assert Chain((LargestWeighted(), Center()), (10.0, 1.0))(batch).advantages.tolist() == [-5, 5]
    assert Chain((LargestWeighted(), Center()))(batch).advantages.tolist() == [1, -1]
    assert Chain((WeightedSum(), Center()), (10.0, 1.0))(batch).advantages.tolist() == [-3, 3]
