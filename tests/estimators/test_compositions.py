"""The steps of each estimator under its settings."""

from __future__ import annotations

import pytest

from tests.facts import facts, says
from verl_ext.errors import ConfigurationError
from verl_ext.estimators import build
from verl_ext.estimators.drgrpo import check
from verl_ext.settings import Settings

A, B = {"on": "b", "at_least": 1.0}, {"rewards": {"keys": ["a", "b"]}}


@pytest.mark.parametrize(
    ("name", "algorithm", "steps"),
    [
        ("drgrpo", {}, "weigh_and_sum centre"),
        ("drgrpo", {"norm_adv_by_std_in_grpo": False}, "weigh_and_sum centre"),
        ("gdpo", B, "centre scale_by_std weigh_and_sum whiten"),
        ("gdpo", B | {"norm_adv_by_std_in_grpo": False}, "centre weigh_and_sum whiten"),
        ("gdpo", B | {"gdpo": {"scale": "mad", "whiten": "none"}}, "centre scale_by_mad weigh_and_sum"),
        ("gdpo", B | {"gdpo": {"scale": "none", "whiten": "token"}}, "centre weigh_and_sum whiten"),
        ("gdpo", B | {"gdpo": {"conditions": {"a": A}}}, "condition centre scale_by_std weigh_and_sum whiten"),
        ("maxrl", {}, "weigh_and_sum divide_by_mean centre"),
        ("gd2po", B, "centre scale_by_std drop_conflicts weigh_and_sum whiten"),
        ("gd2po", B | {"norm_adv_by_std_in_grpo": False}, "centre drop_conflicts weigh_and_sum whiten"),
        ("gd2po", B | {"gd2po": {"whiten": "none"}}, "centre scale_by_std drop_conflicts weigh_and_sum"),
        ("dgpo", {}, "weigh_and_sum centre scale_by_mad balance weigh_by_difficulty"),
        ("dgpo", {"dgpo": {"dgae": False}}, "weigh_and_sum centre scale_by_std balance weigh_by_difficulty"),
        ("dgpo", {"dgpo": {"dqw": False, "balance": "none"}}, "weigh_and_sum centre scale_by_mad"),
        (
            "dgpo",
            {"dgpo": {"dgae": False, "dqw": False, "balance": "none"}, "norm_adv_by_std_in_grpo": False},
            "weigh_and_sum centre",
        ),
        ("hadw", {}, "weigh_and_sum centre scale_by_std weigh_by_history"),
        ("hadw", {"hadw": {"base": "drgrpo"}}, "weigh_and_sum centre weigh_by_history"),
        ("hadw", {"hadw": {"base": "gdpo"}} | B, "centre scale_by_std weigh_and_sum whiten weigh_by_history"),
        (
            "hadw",
            {"hadw": {"base": "dgpo"}},
            "weigh_and_sum centre scale_by_mad balance weigh_by_difficulty weigh_by_history",
        ),
    ],
)
def test_an_estimator_is_these_steps(name, algorithm, steps):
    assert [step.name for step in build(name, Settings.parse(algorithm)).steps] == steps.split()


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


@pytest.mark.parametrize("balance", ["token", "sequence"])
def test_a_balance_that_is_named_is_taken(balance):
    found = build("dgpo", Settings.parse({"dgpo": {"balance": balance}}, loss_agg_mode="token-sum")).steps
    assert [step.over for step in found if step.name == "balance"] == [balance]


NORM, FACTOR, KL = "seq-mean-token-sum-norm", "loss_scale_factor", "use_kl_loss"


@pytest.mark.parametrize(
    ("mode", "actor", "check_loss", "fatal", "told"),
    [
        (NORM, {FACTOR: 0.5}, True, [], ()),
        (NORM, {FACTOR: 1, KL: True}, True, [False], (f"{KL}=False",)),
        (NORM, {}, True, [True], (f"{FACTOR}=512",)),
        (NORM, {FACTOR: 0}, True, [True], (f"{FACTOR}=512",)),
        (NORM, {FACTOR: True}, True, [True], (f"{FACTOR}=512",)),
        (NORM, {FACTOR: "8"}, True, [True], (f"{FACTOR}=512",)),
        ("token-mean", {FACTOR: 8}, True, [True], (f"loss_agg_mode={NORM}",)),
        ("token-mean", {KL: True}, False, [], ()),
    ],
)
def test_the_loss_of_drgrpo(mode, actor, check_loss, fatal, told):
    entries = {"data.max_response_length": 512} | {f"actor_rollout_ref.actor.{name}": actor[name] for name in actor}
    settings = Settings.parse({"drgrpo": {"check_loss": check_loss}}, loss_agg_mode=mode)
    found = list(check(settings, entries.get))
    assert [complaint.fatal for complaint in found] == fatal
    for complaint in found:
        assert says(complaint.text, *told)
        assert complaint.fatal is False or says(complaint.text, "loss_agg_mode=") == (mode != NORM)


def test_an_unknown_estimator_names_the_nearest():
    with pytest.raises(ConfigurationError, match=facts("estimator 'gdop'", "did you mean 'gdpo'")):
        build("gdop", Settings())
