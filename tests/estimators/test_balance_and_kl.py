"""Which groups the balance of dgpo and the KL term of the reward count, by hand."""

import numpy as np
import pytest

from verl_ext import Batch, Settings, build
from verl_ext.core.batch import Condition

WITHOUT_STD = {"norm_adv_by_std_in_grpo": False}
KL_IN_REWARD = {"use_kl_in_reward": True}


def test_balance_by_sequences_counts_the_rows_over_which_the_loss_averages():
    """Group a varies and has sessions of one and two outputs. The zero-variance group b has one output each.

    So the balance factor is 5 rows / 3 rows, and not 4 responses / 2 responses.
    """
    dgpo = {"dqw": False, "dgae": False, "balance": "sequence"}
    chain = build("dgpo", Settings.parse({"dgpo": dgpo, **WITHOUT_STD}))
    batch = Batch.of([[1], [0], [1], [1]], list("aabb"), outputs=[1, 2, 1, 1])
    factor = 5 / 3

    result = chain(batch)

    assert result.metrics["balance_z"] == factor
    np.testing.assert_allclose(result.advantages, [0.5 * factor, -0.5 * factor, 0, 0])


@pytest.mark.parametrize(
    ("loss_agg_mode", "units_of_balance"),
    [
        ("token-mean", ["token"]),
        ("seq-mean-token-sum", ["sequence"]),
        ("seq-mean-token-mean", ["sequence"]),
        ("seq-mean-token-sum-norm", ["sequence"]),
        ("token-sum", []),
    ],
)
def test_dgpo_balances_over_the_unit_of_the_loss(loss_agg_mode, units_of_balance):
    chain = build("dgpo", Settings.parse({}, loss_agg_mode=loss_agg_mode))
    assert [step.over for step in chain.steps if step.name == "balance"] == units_of_balance


LABELS = list("aaaabbbb")
KL = np.array([-1e-4, 2e-4, 0.0, -3e-4, 1e-3, -2e-3, 0.0, 1e-3])


@pytest.mark.parametrize("dgae", [True, False])
def test_dgpo_ignores_the_kl_term_in_zero_variance_groups(dgae):
    """All responses of group b are correct. With KL, too, its advantages are 0 and the balance factor is 8 / 4."""
    accuracy = [1.0, 0, 0, 1, 1, 1, 1, 1]
    rewards = [[value] for value in accuracy]
    chain = build("dgpo", Settings.parse({**KL_IN_REWARD, "dgpo": {"dgae": dgae}}))

    without_kl = chain(Batch.of(rewards, LABELS, accuracy=accuracy))
    with_kl = chain(Batch.of(rewards, LABELS, accuracy=accuracy, kl_reward=KL))

    assert with_kl.advantages[4:].tolist() == [0, 0, 0, 0]
    assert with_kl.metrics["balance_z"] == 2
    assert with_kl.metrics == without_kl.metrics
    assert (with_kl.advantages[:4] != without_kl.advantages[:4]).all()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("compose", {"compose": {"steps": ["weighted_sum", "center", "scale_by_mad"]}}),
        ("hadw", {}),
        ("drgrpo", {}),
    ],
    ids=["compose", "hadw", "drgrpo"],
)
def test_the_kl_term_of_other_estimators_acts_in_every_group(name, config):
    batch = Batch.of([[1.0]] * 8, LABELS, accuracy=[1.0] * 8, kl_reward=KL)
    chain = build(name, Settings.parse(KL_IN_REWARD | config))
    assert (chain(batch).advantages != 0).all()


def test_a_response_whose_condition_is_not_met_keeps_its_kl_term():
    """The easy reward is 0 for both responses, so that the KL terms 0 and -0.5 decide: their mean is -0.25."""
    conditions = {"easy": Condition("hard", at_least=1.0)}
    keys = ("hard", "easy")
    batch = Batch.of([[0, 1], [0, 1]], list("aa"), keys=keys, conditions=conditions, kl_reward=[0.0, -0.5])
    chain = build("drgrpo", Settings.parse(KL_IN_REWARD))
    assert chain(batch).advantages.tolist() == [0.25, -0.25]
