"""The weights of the rewards: data of the batch, which `algorithm.rewards.weights` sets."""

import numpy as np
import pytest
from hypothesis import given

from tests.batches import rollouts
from tests.estimators.estimator_variants import EVERY_VARIANT, KEYS, state_of_hadw
from tests.estimators.two_prompts import config_for
from tests.facts import facts
from verl_ext import Batch, Settings, Step, build
from verl_ext.core.chain import Chain
from verl_ext.core.steps import Center, WeightedSum
from verl_ext.errors import ConfigurationError
from verl_ext.methods import METHODS

WITHOUT_WEIGHTS = {"rewards": {"keys": KEYS["rewards"]["keys"]}}


@EVERY_VARIANT
@given(rollout=rollouts())
def test_the_setting_has_the_effect_of_the_weights_of_the_batch(name, config, rollout):
    state = state_of_hadw(config) if name == "hadw" else None
    batch = rollout.batch()
    weighted_batch = batch.with_weights(KEYS["rewards"]["weights"])
    weighted_chain = build(name, Settings.parse(config))
    chain = build(name, Settings.parse(config | WITHOUT_WEIGHTS))

    from_setting = weighted_chain(batch, state)
    from_batch = chain(weighted_batch, state)

    np.testing.assert_array_equal(from_setting.advantages, from_batch.advantages)
    assert from_setting.metrics == from_batch.metrics
    assert batch.reward_weights.tolist() == [1, 1]  # unchanged


def test_a_chain_built_from_settings_weights_the_rewards():
    """The sums of group a are 2 * 1 - 0 = 2 and 2 * 0 - 3 = -3, with the mean -0.5."""
    settings = Settings.parse({"rewards": {"keys": ["x", "y"], "weights": [2.0, -1.0]}})
    chain = build("drgrpo", settings)
    batch = Batch.of([[1, 0], [0, 3], [1, 1], [1, 1]], list("aabb"), keys=("x", "y"))

    result = chain(batch)

    contributions, total = result.contributions, result.total
    assert contributions.tolist() == [[2, 0], [0, -3], [2, -1], [2, -1]]
    assert total.tolist() == [2, -3, 1, 1]
    assert result.advantages.tolist() == [2.5, -2.5, 0, 0]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_batch_must_have_as_many_rewards_as_there_are_weights(name):
    three_rewards = {"keys": ["x", "y", "z"], "weights": [1.0, 1.0, 1.0]}
    chain = build(name, Settings.parse(config_for(name, rewards=three_rewards)))
    batch = Batch.of([[1, 0], [0, 3]], list("aa"), keys=("x", "y"), accuracy=[1, 0])
    with pytest.raises(ConfigurationError, match=facts("3 weights", "2 rewards 'x', 'y'")):
        chain(batch)


class LargestWeighted(Step):
    """A custom step that sums: the largest weighted reward of a response."""

    name = "largest_weighted"
    sums = True

    def apply(self, values, batch):
        weighted = values * batch.weights
        return weighted.max(axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("sum_step", "weights", "expected_advantages"),
    [
        (LargestWeighted(), None, [1, -1]),  # largest rewards 4 and 2
        (LargestWeighted(), (10.0, 1.0), [-5, 5]),  # largest weighted rewards 10 and 20
        (WeightedSum(), (10.0, 1.0), [-3, 3]),  # weighted sums 14 and 20
    ],
    ids=["custom, without weights", "custom, with weights", "weighted sum"],
)
def test_a_custom_step_reads_the_weights_from_the_batch(sum_step, weights, expected_advantages):
    batch = Batch.of([[1, 4], [2, 0]], list("aa"), keys=("x", "y"))
    chain = Chain((sum_step, Center()), weights)
    assert chain(batch).advantages.tolist() == expected_advantages
