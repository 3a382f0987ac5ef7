"""What the start-up checks warn of, note, or accept without a word, on verl's own configuration."""

from __future__ import annotations

import logging

import pytest

from tests.integration.config.judged import DRGRPO_LOSS, KEYS, ONE_UPDATE, warnings_of
from tests.integration.configs import compose
from verl_ext.integration.config.checks import check_run

pytestmark = pytest.mark.usefixtures("known_verl")

ACCEPTED: dict[str, tuple[str, ...]] = {
    "verl's default": (),
    "a list with a step of one's own": (
        "algorithm.adv_estimator=compose",
        "+algorithm.compose.steps=[weigh_and_sum,centre,{step:tests.integration.own_steps:Clip,limit:1.5}]",
    ),
    "verl's gae": ("algorithm.adv_estimator=gae",),
    "gdpo with verl's names": ("algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[acc,format]"),
    "gdpo with weights": ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.rewards.weights=[1,0.5]"),
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


DOUBTFUL: dict[str, tuple[tuple[str, ...], str]] = {
    "settings of another estimator": (
        ("algorithm.adv_estimator=dgpo", *ONE_UPDATE, "+algorithm.hadw.lambda_scale=1.5"),
        "algorithm.hadw is set, but algorithm.adv_estimator=dgpo does not use it: remove it, or set "
        "algorithm.adv_estimator=hadw",
    ),
    "our settings under verl's own estimator": (
        ("algorithm.adv_estimator=grpo", "+algorithm.gdpo.whiten=token"),
        "algorithm.gdpo is set, but algorithm.adv_estimator=grpo does not use it: remove it, or set "
        "algorithm.adv_estimator=gdpo",
    ),
    "the settings of a base which is not chosen": (
        ("algorithm.adv_estimator=hadw", "+algorithm.hadw.base=dgpo", *ONE_UPDATE, "+algorithm.gdpo.whiten=token"),
        "algorithm.gdpo is set, but algorithm.adv_estimator=hadw does not use it",
    ),
    "weights that only verl could use": (
        ("algorithm.adv_estimator=grpo", KEYS, "+algorithm.rewards.weights=[1,2]"),
        "algorithm.rewards.weights has no effect on verl's grpo",
    ),
    "an accuracy under verl's own estimator": (
        ("algorithm.adv_estimator=grpo", "+algorithm.rewards.accuracy_key=acc"),
        "algorithm.rewards.accuracy_key=acc has no effect",
    ),
    "a threshold under verl's own estimator": (
        ("algorithm.adv_estimator=grpo", KEYS, "+algorithm.rewards.accuracy_threshold=0.5"),
        "algorithm.rewards.accuracy_threshold=0.5 has no effect",
    ),
    "groups filtered by their total": (
        (
            "algorithm.adv_estimator=gdpo",
            KEYS,
            "++algorithm.filter_groups.enable=True",
            "++algorithm.filter_groups.metric=reward",
        ),
        "algorithm.filter_groups.metric=reward drops groups whose total does not vary",
    ),
    "a balance that does not fit the loss": (
        ("algorithm.adv_estimator=dgpo", *ONE_UPDATE, "+algorithm.dgpo.balance=sequence"),
        "algorithm.dgpo.balance=sequence does not fit actor_rollout_ref.actor.loss_agg_mode=token-mean, whose mean "
        "needs balance=token: set algorithm.dgpo.balance=auto",
    ),
    "a filter by rewards under an estimator of the total": (
        (
            "algorithm.adv_estimator=grpo",
            KEYS,
            "++algorithm.filter_groups.enable=True",
            "++algorithm.filter_groups.metric=any_reward",
        ),
        "grpo, which uses the total, learns nothing from them; set algorithm.filter_groups.metric=reward",
    ),
    "a balance of a list that does not fit the loss": (
        (
            "algorithm.adv_estimator=compose",
            *ONE_UPDATE,
            "+algorithm.compose.steps=[weigh_and_sum,centre,{step:balance,over:sequence}]",
        ),
        "algorithm.compose.steps: balance over=sequence does not fit actor_rollout_ref.actor.loss_agg_mode=token-mean, "
        "whose mean needs over: token: write {step: balance, over: token}",
    ),
    "a balance over tokens for a loss of its own": (
        ("algorithm.adv_estimator=dgpo", *ONE_UPDATE, "actor_rollout_ref.actor.policy_loss.loss_mode=sapo"),
        "averages over sequences and ignores loss_agg_mode: set +algorithm.dgpo.balance=sequence",
    ),
    "settings of a weighting which is off": (
        ("algorithm.adv_estimator=dgpo", *ONE_UPDATE, "+algorithm.dgpo={dqw: false, dqw_temp: 9}"),
        "algorithm.dgpo.dqw_temp=9 has no effect with algorithm.dgpo.dqw=False",
    ),
    "an epsilon that nothing adds": (
        ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo={whiten: none, scale: none, epsilon: 1e-3}"),
        "algorithm.gdpo.epsilon=0.001 has no effect with algorithm.gdpo.scale=none and algorithm.gdpo.whiten=none",
    ),
    "an epsilon that nothing adds, as the std is not divided by": (
        (
            "algorithm.adv_estimator=gdpo",
            "++algorithm.gdpo_reward_keys=[acc,format]",
            "+algorithm.gdpo={scale: none, epsilon: 1e-3}",
        ),
        "algorithm.gdpo.epsilon=0.001 has no effect with algorithm.gdpo.scale=none and +algorithm.gdpo.whiten=token",
    ),
    "a setting of verl's that verl's own gdpo ignores": (
        (
            "algorithm.adv_estimator=gdpo",
            "++algorithm.gdpo_reward_keys=[acc,format]",
            "algorithm.norm_adv_by_std_in_grpo=False",
        ),
        "algorithm.norm_adv_by_std_in_grpo=False: rewards are not divided by their std",
    ),
    "a window of posteriors that only counts with eta": (
        ("algorithm.adv_estimator=hadw", "+algorithm.hadw={eta: 0, history_window: 5}"),
        "algorithm.hadw.history_window=5 has no effect with algorithm.hadw.eta=0",
    ),
    "an eta beside the largest eta_min": (
        ("algorithm.adv_estimator=hadw", "+algorithm.hadw={eta: 0.5, eta_min: 1}"),
        "algorithm.hadw.eta=0.5 has no effect with algorithm.hadw.eta_min=1",
    ),
    "an anchor that never moves": (
        ("algorithm.adv_estimator=hadw", "+algorithm.hadw={eta: 0, eta_min: 0}"),
        "set algorithm.hadw.eta_min=0.05",
    ),
    "a window of a list that only counts with eta": (
        (
            "algorithm.adv_estimator=compose",
            "+algorithm.compose.steps=[weigh_and_sum,centre,{step:weigh_by_history,eta:0,history_window:5}]",
        ),
        "weigh_by_history: history_window=5 has no effect with weigh_by_history: eta=0",
    ),
    "a balance of several mini-batches": (
        (
            "algorithm.adv_estimator=dgpo",
            "data.train_batch_size=256",
            "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        ),
        "data.train_batch_size=256 with actor_rollout_ref.actor.ppo_mini_batch_size=64 makes several",
    ),
    "Dr. GRPO with a KL term": (
        ("algorithm.adv_estimator=drgrpo", *DRGRPO_LOSS, "actor_rollout_ref.actor.use_kl_loss=True"),
        "actor_rollout_ref.actor.use_kl_loss=True: Dr. GRPO trains without a KL term; set "
        "actor_rollout_ref.actor.use_kl_loss=False",
    ),
    "entries of the user's own under verl's estimator": (
        ("algorithm.adv_estimator=grpo", "+algorithm.gdpo={mine: 1}"),
        "'conditions', 'epsilon', 'scale', 'whiten'; verl's grpo runs without this entry",
    ),
    "a wrong entry for all estimators under verl's estimator": (
        ("algorithm.adv_estimator=grpo", "+algorithm.verl_ext={dump_every: 0}"),
        "verl's grpo runs without this entry, and no rewards are logged or dumped",
    ),
    "a dump of rows that are drawn anew": (
        (
            "algorithm.adv_estimator=gae",
            KEYS,
            "+algorithm.verl_ext.dump_dir=x",
            "++algorithm.use_pf_ppo=True",
            "critic.enable=True",
        ),
        "algorithm.verl_ext.dump_dir has no effect with algorithm.use_pf_ppo=True",
    ),
    "a loss that depends on the scale": (
        ("algorithm.adv_estimator=hadw", "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov"),
        "loss_mode=clip_cov depends on the scale of the advantages, which hadw changes",
    ),
}


@pytest.mark.parametrize("case", DOUBTFUL)
def test_it_runs_with_one_warning(case: str, caplog: pytest.LogCaptureFixture) -> None:
    overrides, part = DOUBTFUL[case]
    (message,) = warnings_of(caplog, *overrides)
    assert part in message


def notes_of(caplog: pytest.LogCaptureFixture, *overrides: str) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO, "verl_ext"):
        check_run(compose(*overrides))
    return [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]


@pytest.mark.parametrize(
    ("overrides", "over", "because"),
    [
        ((KEYS,), "sequence", "algorithm.rewards.keys"),
        (("++algorithm.gdpo_reward_keys=[acc,format]",), "token", "algorithm.gdpo_reward_keys"),
    ],
)
@pytest.mark.parametrize("name", ["gdpo", "hadw"])
def test_the_start_says_how_gdpo_whitens_and_why(
    name: str, overrides: tuple[str, ...], over: str, because: str, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = (f"algorithm.adv_estimator={name}", "+algorithm.hadw.base=gdpo")[: 1 + (name == "hadw")]
    (note,) = notes_of(caplog, *chosen, *overrides)
    assert f"algorithm.gdpo.whiten is {over}" in note
    assert because in note


def test_the_start_says_nothing_of_a_whitening_that_was_chosen_or_does_not_take_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert notes_of(caplog, "algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo.whiten=none") == []
    assert notes_of(caplog, "algorithm.adv_estimator=hadw", KEYS) == []
    assert notes_of(caplog, "algorithm.adv_estimator=dgpo", KEYS, *ONE_UPDATE) == []
