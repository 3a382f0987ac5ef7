"""What a setting means where float32 or sessions of several outputs are in the way."""

import numpy as np
import pytest

from verl_ext import Batch, Settings, build
from verl_ext.core.batch import Condition, unit_accuracy

WITHOUT_STD = {"norm_adv_by_std_in_grpo": False}


@pytest.mark.parametrize(("threshold", "size"), [(0.0, 1), (0.5, 1), (100.0, 100), (-100.0, 100)])
def test_the_margin_of_a_threshold_is_a_millionth_of_it_or_of_one(threshold, size):
    """Rounding in float32 is less: float32(0.7) is 0.69999999, and has reached 0.7."""
    values = threshold + np.array([-1.5, -0.5, 0.5, 1.5]) * 1e-6 * size
    assert unit_accuracy(values, list("abcd"), key="k", threshold=threshold).tolist() == [0, 0, 0, 1]
    assert Condition("hard", threshold).met(values).tolist() == [0, 1, 1, 1]


def test_balance_by_sequences_counts_the_rows_over_which_the_loss_averages():
    """Group a varies: sessions of one and two outputs. Group b does not: one output each. z is 5 rows over 3, not 2."""
    settings = Settings.parse({"dgpo": {"dqw": False, "dgae": False, "balance": "sequence"}, **WITHOUT_STD})
    batch = Batch.of([[1], [0], [1], [1]], list("aabb"), outputs=[1, 2, 1, 1])
    result = build("dgpo", settings)(batch)
    assert result.metrics["balance_z"] == 5 / 3
    np.testing.assert_allclose(result.advantages, [5 / 6, -5 / 6, 0, 0])


@pytest.mark.parametrize(
    ("mode", "over"),
    [
        ("token-mean", "token"),
        ("seq-mean-token-sum", "sequence"),
        ("seq-mean-token-mean", "sequence"),
        ("seq-mean-token-sum-norm", "sequence"),
        ("token-sum", None),
    ],
)
def test_the_balance_follows_the_loss(mode, over):
    found = build("dgpo", Settings.parse({}, loss_agg_mode=mode)).steps
    assert [step.over for step in found if step.name == "balance"] == ([over] if over else [])


KL = np.array([-1e-4, 2e-4, 0.0, -3e-4, 1e-3, -2e-3, 0.0, 1e-3])


@pytest.mark.parametrize("dgae", [True, False])
def test_the_kl_term_does_not_make_a_group_of_dgpo_valid(dgae):
    """Group b is solved: its advantage is 0, z is 2, and it has no part in the weights, as without KL."""
    right = [1.0, 0, 0, 1, 1, 1, 1, 1]
    chain = build("dgpo", Settings.parse({"use_kl_in_reward": True, "dgpo": {"dgae": dgae}}))
    without, with_kl = (
        chain(Batch.of(np.array(right)[:, None], list("aaaabbbb"), accuracy=right, kl_reward=kl)) for kl in (None, KL)
    )
    assert with_kl.advantages[4:].tolist() == [0] * 4
    assert with_kl.metrics == without.metrics
    assert with_kl.metrics["balance_z"] == 2
    assert (with_kl.advantages[:4] != without.advantages[:4]).all()


def test_the_kl_term_of_other_estimators_acts_in_every_group():
    batch = Batch.of([[1.0]] * 8, list("aaaabbbb"), accuracy=[1.0] * 8, kl_reward=KL)
    steps = ["weighted_sum", "center", "scale_by_mad"]
    for name, config in (("compose", {"compose": {"steps": steps}}), ("hadw", {}), ("drgrpo", {})):
        assert (build(name, Settings.parse({"use_kl_in_reward": True, **config}))(batch).advantages != 0).all()


def test_a_response_whose_condition_is_not_met_keeps_its_kl_term():
    settings = Settings.parse({"use_kl_in_reward": True})
    conditions = {"easy": Condition("hard", 1.0)}
    batch = Batch.of([[0, 1], [0, 1]], "aa", keys=("hard", "easy"), conditions=conditions, kl_reward=[0.0, -0.5])
    assert build("drgrpo", settings)(batch).advantages.tolist() == [0.25, -0.25]
