"""What an estimator chooses by the loss, and the loss of drgrpo."""

from __future__ import annotations

import pytest

from tests.facts import says
from verl_ext.estimators.drgrpo import rule
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


NORM, FACTOR, KL = "seq-mean-token-sum-norm", "loss_scale_factor", "use_kl_loss"


@pytest.mark.parametrize(
    ("mode", "actor", "check_loss", "fatal", "told"),
    [
        (NORM, {FACTOR: 0.5}, True, [], ()),
        (NORM, {FACTOR: 1, KL: True}, True, [False], (f"{KL}=False",)),
        (NORM, {}, True, [True], (f"{FACTOR}=512",)),
        (NORM, {FACTOR: "8"}, True, [True], (f"{FACTOR}=512",)),
        ("token-mean", {FACTOR: 8}, True, [True], (f"loss_agg_mode={NORM}",)),
        ("token-mean", {KL: True}, False, [], ()),
    ],
)
def test_the_loss_of_drgrpo(mode, actor, check_loss, fatal, told):
    entries = {"data.max_response_length": 512} | {f"actor_rollout_ref.actor.{name}": actor[name] for name in actor}
    settings = Settings.parse({"drgrpo": {"check_loss": check_loss}}, loss_agg_mode=mode)
    found = list(rule(settings, entries.get))
    assert [complaint.fatal for complaint in found] == fatal
    for complaint in found:
        assert says(complaint.text, *told)
        assert complaint.fatal is False or says(complaint.text, "loss_agg_mode=") == (mode != NORM)
