"""What the start-up checks warn of, note, or accept without a word, on verl's own configuration."""

from __future__ import annotations

import logging

import pytest

from tests.facts import says
from tests.integration.config.judged import DRGRPO_LOSS, KEYS, ONE_UPDATE, warnings_of
from tests.integration.configs import compose
from verl_ext.integration.config.checks import check_run

pytestmark = pytest.mark.usefixtures("known_verl")

WEIGHT = "+algorithm.rewards={keys: [acc], weights: [5]}"
ACCEPTED: dict[str, tuple[str, ...]] = {
    "verl's default": (),
    "a list with a step of one's own": (
        "algorithm.adv_estimator=compose",
        "+algorithm.compose.steps=[weigh_and_sum,centre,{step:tests.integration.own_steps:Clip,limit:1.5}]",
    ),
    "verl's gae": ("algorithm.adv_estimator=gae",),
    "gdpo with verl's names": ("algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[acc,format]"),
    "gdpo with weights": ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.rewards.weights=[1,0.5]"),
    "gdpo with one weight, divided before it": ("algorithm.adv_estimator=gdpo", WEIGHT, "+algorithm.gdpo.whiten=none"),
    "drgrpo with one weight": ("algorithm.adv_estimator=drgrpo", *DRGRPO_LOSS, WEIGHT),
    "dgpo with one reward turned round": ("algorithm.adv_estimator=dgpo", *ONE_UPDATE, WEIGHT.replace("5", "-5")),
    "dgpo": ("algorithm.adv_estimator=dgpo", *ONE_UPDATE),
    "hadw": ("algorithm.adv_estimator=hadw",),
    "dgpo, its mean over sequences by the loss and by the mode": (
        "algorithm.adv_estimator=dgpo",
        *ONE_UPDATE,
        "actor_rollout_ref.actor.policy_loss.loss_mode=sapo",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    ),
    "drgrpo with its loss": ("algorithm.adv_estimator=drgrpo", *DRGRPO_LOSS),
    "drgrpo with another loss on purpose": ("algorithm.adv_estimator=drgrpo", "+algorithm.drgrpo.check_loss=False"),
    "drgrpo with KL in the reward": ("algorithm.adv_estimator=drgrpo", *DRGRPO_LOSS, "algorithm.use_kl_in_reward=True"),
    "drgrpo, which never divides, told not to": (
        "algorithm.adv_estimator=drgrpo",
        *DRGRPO_LOSS,
        "algorithm.norm_adv_by_std_in_grpo=False",
    ),
    "gdpo told twice not to divide": (
        "algorithm.adv_estimator=gdpo",
        KEYS,
        "+algorithm.gdpo.scale=none",
        "algorithm.norm_adv_by_std_in_grpo=False",
    ),
    "grpo with rewards to log": ("algorithm.adv_estimator=grpo", KEYS),
    "gdpo as a primary configuration": ("--gdpo", "algorithm.rewards.keys=[acc,format]"),
    "dgpo as a primary configuration": ("--dgpo", *ONE_UPDATE),
    "hadw as a primary configuration": ("--hadw",),
    "drgrpo as a primary configuration": ("--drgrpo",),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_it_runs_without_a_word(case: str, caplog: pytest.LogCaptureFixture) -> None:
    overrides = ACCEPTED[case]
    name = "ppo_trainer"
    if overrides and overrides[0].startswith("--"):
        name, overrides = overrides[0].removeprefix("--"), overrides[1:]
    with caplog.at_level(logging.WARNING, "verl_ext"):
        check_run(compose(*overrides, config_name=name))
    assert [record.getMessage() for record in caplog.records if record.name == "verl_ext"] == []


DOUBTFUL: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "settings of another estimator": (
        ("algorithm.adv_estimator=dgpo", *ONE_UPDATE, "+algorithm.hadw.lambda_scale=1.5"),
        ("algorithm.hadw", "algorithm.adv_estimator=dgpo", "set algorithm.adv_estimator=hadw"),
    ),
    "our settings under verl's own estimator": (
        ("algorithm.adv_estimator=grpo", "+algorithm.gdpo.whiten=token"),
        ("algorithm.gdpo", "algorithm.adv_estimator=grpo", "set algorithm.adv_estimator=gdpo"),
    ),
    "the settings of a base which is not chosen": (
        ("algorithm.adv_estimator=hadw", "+algorithm.hadw.base=dgpo", *ONE_UPDATE, "+algorithm.gdpo.whiten=token"),
        ("algorithm.gdpo", "algorithm.adv_estimator=hadw", "set algorithm.adv_estimator=gdpo"),
    ),
    "weights that only verl could use": (
        ("algorithm.adv_estimator=grpo", KEYS, "+algorithm.rewards.weights=[1,2]"),
        ("algorithm.rewards.weights", "grpo", "algorithm.adv_estimator", "'compose', 'dgpo', 'drgrpo', 'gdpo', 'hadw'"),
    ),
    "an accuracy under verl's own estimator": (
        ("algorithm.adv_estimator=grpo", "+algorithm.rewards.accuracy_key=acc"),
        ("algorithm.rewards.accuracy_key=acc", "grpo"),
    ),
    "a threshold under verl's own estimator": (
        ("algorithm.adv_estimator=grpo", KEYS, "+algorithm.rewards.accuracy_threshold=0.5"),
        ("algorithm.rewards.accuracy_threshold=0.5", "grpo"),
    ),
    "groups filtered by their total": (
        (
            "algorithm.adv_estimator=gdpo",
            KEYS,
            "++algorithm.filter_groups.enable=True",
            "++algorithm.filter_groups.metric=reward",
        ),
        ("algorithm.filter_groups.metric=reward", "gdpo", "set algorithm.filter_groups.metric=any_reward"),
    ),
    "a balance that does not fit the loss": (
        ("algorithm.adv_estimator=dgpo", *ONE_UPDATE, "+algorithm.dgpo.balance=sequence"),
        (
            "algorithm.dgpo.balance=sequence",
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "balance=token",
            "set algorithm.dgpo.balance=auto",
        ),
    ),
    "a filter by rewards under an estimator of the total": (
        (
            "algorithm.adv_estimator=grpo",
            KEYS,
            "++algorithm.filter_groups.enable=True",
            "++algorithm.filter_groups.metric=any_reward",
        ),
        ("algorithm.filter_groups.metric=any_reward", "grpo", "set algorithm.filter_groups.metric=reward"),
    ),
    "a balance of a list that does not fit the loss": (
        (
            "algorithm.adv_estimator=compose",
            *ONE_UPDATE,
            "+algorithm.compose.steps=[weigh_and_sum,centre,{step:balance,over:sequence}]",
        ),
        (
            "algorithm.compose.steps",
            "over=sequence",
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "{step: balance, over: token}",
        ),
    ),
    "a balance over tokens for a loss of its own": (
        ("algorithm.adv_estimator=dgpo", *ONE_UPDATE, "actor_rollout_ref.actor.policy_loss.loss_mode=sapo"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=sapo", "set +algorithm.dgpo.balance=sequence"),
    ),
    "settings of a weighting which is off": (
        ("algorithm.adv_estimator=dgpo", *ONE_UPDATE, "+algorithm.dgpo={dqw: false, dqw_temp: 9}"),
        ("algorithm.dgpo.dqw_temp=9", "algorithm.dgpo.dqw=False"),
    ),
    "an epsilon that nothing adds": (
        ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo={whiten: none, scale: none, epsilon: 1e-3}"),
        ("algorithm.gdpo.epsilon=0.001", "algorithm.gdpo.scale=none", "algorithm.gdpo.whiten=none"),
    ),
    "an epsilon that nothing adds, as whitening is over tokens": (
        (
            "algorithm.adv_estimator=gdpo",
            "++algorithm.gdpo_reward_keys=[acc,format]",
            "+algorithm.gdpo={scale: none, epsilon: 1e-3}",
        ),
        ("algorithm.gdpo.epsilon=0.001", "algorithm.gdpo.scale=none", "+algorithm.gdpo.whiten=token"),
    ),
    "an epsilon that nothing adds, as the std is not divided by": (
        (
            "algorithm.adv_estimator=gdpo",
            KEYS,
            "algorithm.norm_adv_by_std_in_grpo=False",
            "+algorithm.gdpo={whiten: none, epsilon: 1e-3}",
        ),
        ("algorithm.gdpo.epsilon=0.001", "algorithm.norm_adv_by_std_in_grpo=False", "algorithm.gdpo.whiten=none"),
    ),
    "a setting of verl's that verl's own gdpo ignores": (
        (
            "algorithm.adv_estimator=gdpo",
            "++algorithm.gdpo_reward_keys=[acc,format]",
            "algorithm.norm_adv_by_std_in_grpo=False",
        ),
        ("algorithm.norm_adv_by_std_in_grpo=False", "gdpo", "set algorithm.norm_adv_by_std_in_grpo=True"),
    ),
    "the weight of the only reward": (
        ("algorithm.adv_estimator=dgpo", *ONE_UPDATE, WEIGHT),
        ("algorithm.rewards.weights=[5]", "dgpo", "remove"),
    ),
    "the weight of the only reward, in a sum that is whitened": (
        ("algorithm.adv_estimator=gdpo", WEIGHT),
        ("algorithm.rewards.weights=[5]", "gdpo", "remove"),
    ),
    "weights so small that totals count as constant": (
        ("algorithm.adv_estimator=gdpo", "+algorithm.rewards={keys: [acc, format], weights: [0, -1e-7]}"),
        ("algorithm.rewards.weights=[0.0, -1e-07]", "1e-6", "divide all weights by 1e-07"),
    ),
    "a factor of a list that whitening takes out": (
        (
            "algorithm.adv_estimator=compose",
            "+algorithm.compose.steps=[weigh_and_sum,centre,{step:weigh_by_history,anchor:window,lambda_scale:10},whiten]",
        ),
        ("weigh_by_history", "lambda_scale=10", "whiten"),
    ),
    "a window of posteriors that only counts with eta": (
        ("algorithm.adv_estimator=hadw", "+algorithm.hadw={eta: 0, history_window: 5}"),
        ("algorithm.hadw.history_window=5", "algorithm.hadw.eta=0"),
    ),
    "an eta beside the largest eta_min": (
        ("algorithm.adv_estimator=hadw", "+algorithm.hadw={eta: 0.5, eta_min: 1}"),
        ("algorithm.hadw.eta=0.5", "algorithm.hadw.eta_min=1"),
    ),
    "an anchor that never moves": (
        ("algorithm.adv_estimator=hadw", "+algorithm.hadw={eta: 0, eta_min: 0}"),
        ("algorithm.hadw.eta=0", "algorithm.hadw.eta_min=0", "set algorithm.hadw.eta_min=0.05", "anchor=fixed"),
    ),
    "a window of a list that only counts with eta": (
        (
            "algorithm.adv_estimator=compose",
            "+algorithm.compose.steps=[weigh_and_sum,centre,{step:weigh_by_history,eta:0,history_window:5}]",
        ),
        ("weigh_by_history", "history_window=5", "eta=0"),
    ),
    "a balance of several mini-batches": (
        (
            "algorithm.adv_estimator=dgpo",
            "data.train_batch_size=256",
            "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        ),
        (
            "step balance",
            "data.train_batch_size=256",
            "actor_rollout_ref.actor.ppo_mini_batch_size=64",
            "dgpo/balance_z",
            "set actor_rollout_ref.actor.ppo_mini_batch_size=256",
        ),
    ),
    "Dr. GRPO with a KL term": (
        ("algorithm.adv_estimator=drgrpo", *DRGRPO_LOSS, "actor_rollout_ref.actor.use_kl_loss=True"),
        ("actor_rollout_ref.actor.use_kl_loss=True", "Dr. GRPO", "set actor_rollout_ref.actor.use_kl_loss=False"),
    ),
    "entries of the user's own under verl's estimator": (
        ("algorithm.adv_estimator=grpo", "+algorithm.gdpo={mine: 1}"),
        ("algorithm.gdpo", "'mine'", "'conditions', 'epsilon', 'scale', 'whiten'", "grpo"),
    ),
    "a wrong entry for all estimators under verl's estimator": (
        ("algorithm.adv_estimator=grpo", "+algorithm.verl_ext={dump_every: 0}"),
        ("algorithm.verl_ext.dump_every", "at least 1", "found 0", "grpo", "no rewards are logged or dumped"),
    ),
    "a dump of rows that are drawn anew": (
        (
            "algorithm.adv_estimator=gae",
            KEYS,
            "+algorithm.verl_ext.dump_dir=x",
            "++algorithm.use_pf_ppo=True",
            "critic.enable=True",
        ),
        ("algorithm.verl_ext.dump_dir", "algorithm.use_pf_ppo=True"),
    ),
    "a loss that depends on the scale": (
        ("algorithm.adv_estimator=hadw", "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov", "hadw", "set loss_mode=vanilla"),
    ),
}


@pytest.mark.parametrize("case", DOUBTFUL)
def test_it_runs_with_one_warning(case: str, caplog: pytest.LogCaptureFixture) -> None:
    overrides, parts = DOUBTFUL[case]
    (message,) = warnings_of(caplog, *overrides)
    assert says(message, *parts)


def notes_of(caplog: pytest.LogCaptureFixture, *overrides: str) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "verl_ext"):
        check_run(compose(*overrides))
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


@pytest.mark.parametrize(
    ("keys", "over", "other", "because"),
    [
        (KEYS, "sequence", "token", "algorithm.rewards.keys"),
        ("++algorithm.gdpo_reward_keys=[acc,format]", "token", "sequence", "algorithm.gdpo_reward_keys"),
    ],
)
@pytest.mark.parametrize(
    "estimator",
    [("algorithm.adv_estimator=gdpo",), ("algorithm.adv_estimator=hadw", "+algorithm.hadw.base=gdpo")],
    ids=["gdpo", "hadw"],
)
def test_the_start_says_how_gdpo_whitens_and_why(
    estimator: tuple[str, ...], keys: str, over: str, other: str, because: str, caplog: pytest.LogCaptureFixture
) -> None:
    (note,) = notes_of(caplog, *estimator, keys)
    assert says(note, "algorithm.gdpo.whiten", f"{over} (auto)", because, f"algorithm.gdpo.whiten={other}")


def test_the_start_says_nothing_of_a_whitening_that_was_chosen_or_does_not_take_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert notes_of(caplog, "algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo.whiten=none") == []
    assert notes_of(caplog, "algorithm.adv_estimator=hadw", KEYS) == []
    assert notes_of(caplog, "algorithm.adv_estimator=dgpo", KEYS, *ONE_UPDATE) == []
