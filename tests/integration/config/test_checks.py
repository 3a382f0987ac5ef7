"""What the start-up checks refuse on verl's own configuration: each rule, by what its message says."""

from __future__ import annotations

import logging

import pytest

from tests.facts import facts, says
from tests.integration.config.judged import DRGRPO_LOSS, KEYS, refusal, warnings_of
from tests.integration.configs import compose
from verl_ext.errors import ConfigurationError
from verl_ext.integration.config.checks import check_run

pytestmark = pytest.mark.usefixtures("known_verl")

REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "an estimator that does not exist": (
        ("algorithm.adv_estimator=gdop",),
        ("unknown estimator 'gdop' (did you mean 'gdpo'?)", "valid: 'compose', 'dgpo', 'drgrpo'", "'hadw'", "'rloo'"),
    ),
    "a setting that does not exist": (
        ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo.whitn=token"),
        ("algorithm.gdpo: unknown setting 'whitn' (did you mean 'whiten'?)", "valid: 'conditions', 'epsilon'"),
    ),
    "a section that does not exist": (
        ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdop.whiten=token"),
        ("algorithm.gdop", "did you mean algorithm.gdpo"),
    ),
    "a value that does not exist": (
        ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo.whiten=tokens"),
        ("algorithm.gdpo.whiten", "'tokens'", "did you mean 'token'", "'sequence'"),
    ),
    "a section that is no section": (
        ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo=token"),
        ("algorithm.gdpo", "section", "'token'"),
    ),
    "three weights for two keys": (
        ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.rewards.weights=[1,2,3]"),
        ("3 reward weights", "2 reward keys", "algorithm.rewards.weights=[1.0, 2.0, 3.0]", "'acc', 'format'"),
    ),
    "verl's names for the same, wrong in number": (
        (
            "algorithm.adv_estimator=gdpo",
            "+algorithm.gdpo_reward_keys=[acc,format]",
            "+algorithm.gdpo_reward_weights=[1]",
        ),
        ("1 reward weights", "2 reward keys", "algorithm.gdpo_reward_weights=[1.0]", "algorithm.gdpo_reward_keys="),
    ),
    "keys under both names": (
        ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo_reward_keys=[acc]"),
        ("algorithm.rewards.keys=['acc', 'format']", "algorithm.gdpo_reward_keys=['acc']", "remove one"),
    ),
    "gdpo without keys": (
        ("algorithm.adv_estimator=gdpo", "reward.custom_reward_function.path=/my/rewards.py"),
        ("set '+algorithm.rewards.keys=[...]'", "/my/rewards.py"),
    ),
    "hadw on gdpo without keys": (
        ("algorithm.adv_estimator=hadw", "+algorithm.hadw.base=gdpo"),
        ("hadw", "set '+algorithm.rewards.keys=[...]'"),
    ),
    "token scores of no keys": (
        ("algorithm.adv_estimator=dgpo", "+algorithm.rewards.token_scores=True"),
        ("algorithm.rewards.token_scores=True", "+algorithm.rewards.keys=[...]"),
    ),
    "a condition on a reward that is no key": (
        ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo.conditions={format: {on: accu, at_least: 1}}"),
        ("algorithm.gdpo.conditions", "'accu'", "did you mean 'acc'", "algorithm.rewards.keys"),
    ),
    "drgrpo with verl's default loss": (
        ("algorithm.adv_estimator=drgrpo", "data.max_response_length=3000"),
        (
            "actor_rollout_ref.actor.loss_agg_mode=token-mean",
            "actor_rollout_ref.actor.loss_scale_factor=null",
            "Add actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm "
            "actor_rollout_ref.actor.loss_scale_factor=3000",
            "+algorithm.drgrpo.check_loss=False",
        ),
    ),
    "drgrpo with a factor of nothing": (
        ("algorithm.adv_estimator=drgrpo", DRGRPO_LOSS[0], "data.max_response_length=512"),
        ("loss_scale_factor=null", "Add actor_rollout_ref.actor.loss_scale_factor=512"),
    ),
    "drgrpo with a loss that aggregates in its own way": (
        ("algorithm.adv_estimator=drgrpo", *DRGRPO_LOSS, "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean"),
        ("loss_mode=geo_mean", "Add actor_rollout_ref.actor.policy_loss.loss_mode="),
    ),
    "hadw on drgrpo with verl's default loss": (
        ("algorithm.adv_estimator=hadw", "+algorithm.hadw.base=drgrpo"),
        ("loss_agg_mode=token-mean", "loss_agg_mode=seq-mean-token-sum-norm"),
    ),
    "gdpo with KL in the reward": (
        ("algorithm.adv_estimator=gdpo", KEYS, "algorithm.use_kl_in_reward=True"),
        ("algorithm.use_kl_in_reward=True", "gdpo", "actor_rollout_ref.actor.use_kl_loss=True"),
    ),
    "dgpo without the division it does not make": (
        ("algorithm.adv_estimator=dgpo", "algorithm.norm_adv_by_std_in_grpo=False"),
        ("algorithm.norm_adv_by_std_in_grpo=False", "dgpo", "set +algorithm.dgpo.dgae=False"),
    ),
    "a list without steps": (
        ("algorithm.adv_estimator=compose",),
        ("set '+algorithm.compose.steps=[...]'",),
    ),
    "a filter by rewards without their names": (
        (
            "algorithm.adv_estimator=dgpo",
            "++algorithm.filter_groups.enable=True",
            "++algorithm.filter_groups.metric=any_reward",
        ),
        ("algorithm.filter_groups.metric=any_reward", "algorithm.rewards.keys"),
    ),
    "a filter by rewards where it does not work": (
        (
            "algorithm.adv_estimator=gdpo",
            KEYS,
            "++algorithm.filter_groups.enable=True",
            "++algorithm.filter_groups.metric=any_reward",
            "trainer.use_v1=False",
            "trainer.v1.sampler.custom_sampler.path=/my/sampler.py",
        ),
        ("remove trainer.use_v1=False", "custom_sampler.path=/my/sampler.py"),
    ),
    "a step that does not exist": (
        ("algorithm.adv_estimator=compose", "+algorithm.compose.steps=[weigh_and_sum,center]"),
        ("algorithm.compose.steps[1]", "'center'", "did you mean 'centre'"),
    ),
    "a step in the wrong place": (
        ("algorithm.adv_estimator=compose", KEYS, "+algorithm.compose.steps=[scale_by_std,centre,weigh_and_sum]"),
        ("algorithm.compose.steps[0]", "scale_by_std", "must come after centre"),
    ),
    "a setting of a step that does not exist": (
        ("algorithm.adv_estimator=compose", "+algorithm.compose.steps=[weigh_and_sum,{step:whiten,by:token}]"),
        ("algorithm.compose.steps[1]", "whiten", "unknown", "'by'"),
    ),
    "a step of one's own that is nowhere": (
        ("algorithm.adv_estimator=compose", "+algorithm.compose.steps=[weigh_and_sum,no_package.steps:Clip]"),
        ("algorithm.compose.steps[1]", "'no_package.steps:Clip'", "No module named 'no_package'", "node"),
    ),
    "a step of one's own that does not hold": (
        (
            "algorithm.adv_estimator=compose",
            "+algorithm.compose.steps=[weigh_and_sum,tests.integration.own_steps:Broken]",
        ),
        ("step 'broken'", "tests.integration.own_steps:Broken", "KeyError: 'hard'"),
    ),
    "a list that needs the rewards' names": (
        ("algorithm.adv_estimator=compose", "+algorithm.compose.steps=[centre,weigh_and_sum]"),
        ("compose", "set '+algorithm.rewards.keys=[...]'"),
    ),
    "a condition of a list on a reward that is no key": (
        (
            "algorithm.adv_estimator=compose",
            KEYS,
            "+algorithm.compose.steps=[{step:condition,conditions:{format:{on:accu,at_least:1}}},weigh_and_sum]",
        ),
        ("algorithm.compose.steps", "condition", "'accu'", "did you mean 'acc'"),
    ),
    "a setting of another anchor": (
        ("algorithm.adv_estimator=hadw", "+algorithm.hadw={anchor: window, eta: 0.2}"),
        (
            "algorithm.hadw.eta=0.2",
            "algorithm.hadw.anchor=window",
            "algorithm.hadw.anchor=soft",
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_what_was_found_and_what_to_change(case: str) -> None:
    overrides, parts = REFUSED[case]
    message = refusal(*overrides)
    name = next(override.partition("=")[2] for override in overrides if override.startswith("algorithm.adv_estimator"))
    assert says(message, f"algorithm.adv_estimator={name}", *parts)


def test_all_that_is_wrong_is_said_at_once() -> None:
    message = refusal("algorithm.adv_estimator=gdpo", "algorithm.use_kl_in_reward=True")
    assert message.count("\n  - ") == 2
    assert says(message, "algorithm.use_kl_in_reward=True", "set '+algorithm.rewards.keys=[...]'")


def test_what_a_message_says_to_add_can_be_added_as_it_stands() -> None:
    wrong = ("algorithm.adv_estimator=drgrpo", "data.max_response_length=3000")
    add, on_purpose = refusal(*wrong).split(". Add ")[1].split(" (or ")
    check_run(compose(*wrong, *add.split()))
    check_run(compose(*wrong, on_purpose.split()[0]))


def test_settings_that_a_preset_brought_are_named_without_a_plus() -> None:
    with pytest.raises(ConfigurationError, match=facts("set 'algorithm.rewards.keys=[...]'")):
        check_run(compose("+verl_ext=gdpo"))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("gdpo_reward_weight=[1,2]", "algorithm.gdpo_reward_weights"),
        ("reward_weights=[1,2]", "algorithm.gdpo_reward_weights"),
        ("whiten=token", "algorithm.gdpo.whiten"),
        ("reward.keys=[acc]", "algorithm.rewards"),
    ],
)
def test_a_misspelt_setting_is_refused_and_under_verl_s_estimators_warned_of(
    written: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = f"algorithm.{written.partition('=')[0].partition('.')[0]}"
    refused = refusal("algorithm.adv_estimator=gdpo", KEYS, f"+algorithm.{written}")
    (warning,) = warnings_of(caplog, "algorithm.adv_estimator=grpo", f"+algorithm.{written}")
    for message in (refused, warning):
        assert says(message, unknown, f"did you mean {meant}")


@pytest.mark.parametrize("name", ["my_grpo", "grpo_v2"])
def test_a_name_that_resembles_ours_may_be_the_user_s_own(name: str) -> None:
    check_run(compose(f"algorithm.adv_estimator={name}"), unregistered=True)


def test_a_section_of_verl_s_own_is_not_taken_for_a_misspelling() -> None:
    check_run(compose("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.rollout_correction.mine=1"))


def test_a_name_of_the_user_s_own_may_be_registered_where_the_trainer_runs(caplog: pytest.LogCaptureFixture) -> None:
    config = compose("algorithm.adv_estimator=my_method")
    with caplog.at_level(logging.WARNING, "verl_ext"):
        check_run(config, unregistered=True)
    assert says(caplog.text, "my_method", "not registered")
    with pytest.raises(ConfigurationError, match=facts("unknown", "'my_method'")):
        check_run(config)


def test_the_estimator_s_name_may_be_verl_s_enum() -> None:
    from verl.trainer.ppo.core_algos import AdvantageEstimator

    config = compose(KEYS)
    config.algorithm.adv_estimator = AdvantageEstimator.GDPO
    check_run(config)
    config = compose()
    config.algorithm.adv_estimator = AdvantageEstimator.GDPO
    told = facts("algorithm.adv_estimator=gdpo", "+algorithm.rewards.keys=[...]")
    with pytest.raises(ConfigurationError, match=told):
        check_run(config)
