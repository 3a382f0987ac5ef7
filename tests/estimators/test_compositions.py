"""What an estimator chooses by the loss."""

import pytest

from verl_ext.registry import build
from verl_ext.settings import Settings


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
