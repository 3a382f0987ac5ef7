"""The start-up checks on verl's own configuration: each rule, by what its message says."""

from __future__ import annotations

import logging
import re

import pytest

from tests.integration.configs import compose
from verl_ext.errors import ConfigurationError
from verl_ext.integration.compat.versions import TESTED
from verl_ext.integration.config.checks import check_run

KEYS = "+algorithm.rewards.keys=[acc,format]"
DRGRPO_LOSS = (
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
    "actor_rollout_ref.actor.loss_scale_factor=3000",
)
ONE_UPDATE = ("data.train_batch_size=256", "actor_rollout_ref.actor.ppo_mini_batch_size=256")


@pytest.fixture(autouse=True)
def known_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a verl whose losses the package does not know, the rules are those of the last tested version."""
    import verl

    if verl.__version__ not in TESTED:
        monkeypatch.setattr(verl, "__version__", TESTED[-1])


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_run(compose(*overrides))
    return str(caught.value)


def warnings_of(caplog: pytest.LogCaptureFixture, *overrides: str) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "verl_ext"):
        check_run(compose(*overrides))
    return [record.getMessage() for record in caplog.records if record.name == "verl_ext"]


REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "an estimator that does not exist": (
        ("algorithm.adv_estimator=gdop",),
        ("unknown estimator 'gdop' (did you mean 'gdpo'?)", "valid: 'compose', 'dgpo', 'drgrpo'", "'hadw'", "'rloo'"),
    ),
    "a setting that does not exist": (
        ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo.whitn=token"),
        ("algorithm.gdpo: unknown setting 'whitn' (did you mean 'whiten'?)", "valid: 'conditions', 'epsilon'"),
    ),
    "a value that does not exist": (
        ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo.whiten=tokens"),
        ("algorithm.gdpo.whiten: unknown value 'tokens' (did you mean 'token'?)", "'sequence'"),
    ),
    "a section that is no section": (
        ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo=token"),
        ("algorithm.gdpo must be a section of settings, found 'token'",),
    ),
    "three weights for two keys": (
        ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.rewards.weights=[1,2,3]"),
        ("3 reward weights for 2 reward keys", "algorithm.rewards.weights=[1.0, 2.0, 3.0]", "'acc', 'format'"),
    ),
    "verl's names for the same, wrong in number": (
        (
            "algorithm.adv_estimator=gdpo",
            "+algorithm.gdpo_reward_keys=[acc,format]",
            "+algorithm.gdpo_reward_weights=[1]",
        ),
        ("1 reward weights for 2 reward keys: algorithm.gdpo_reward_weights=[1.0], algorithm.gdpo_reward_keys=",),
    ),
    "keys under both names": (
        ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo_reward_keys=[acc]"),
        ("algorithm.rewards.keys=['acc', 'format'] and algorithm.gdpo_reward_keys=['acc'] are both set", "remove one"),
    ),
    "gdpo without keys": (
        ("algorithm.adv_estimator=gdpo", "reward.custom_reward_function.path=/my/rewards.py"),
        ("set +algorithm.rewards.keys=[...]", "the reward function in /my/rewards.py returns"),
    ),
    "hadw on gdpo without keys": (
        ("algorithm.adv_estimator=hadw", "+algorithm.hadw.base=gdpo"),
        ("hadw normalises each reward separately", "set +algorithm.rewards.keys=[...]"),
    ),
    "token scores of no keys": (
        ("algorithm.adv_estimator=dgpo", "+algorithm.rewards.token_scores=True"),
        ("algorithm.rewards.token_scores=True needs +algorithm.rewards.keys=[...]",),
    ),
    "a condition on a reward that is no key": (
        ("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdpo.conditions={format: {on: accu, at_least: 1}}"),
        ("algorithm.gdpo.conditions: unknown reward 'accu' (did you mean 'acc'?)", "(algorithm.rewards.keys)"),
    ),
    "drgrpo with verl's default loss": (
        ("algorithm.adv_estimator=drgrpo", "data.max_response_length=3000"),
        (
            "Found actor_rollout_ref.actor.loss_agg_mode=token-mean; actor_rollout_ref.actor.loss_scale_factor=null",
            "Add actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm "
            "actor_rollout_ref.actor.loss_scale_factor=3000",
            "or +algorithm.drgrpo.check_loss=False",
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
        ("Dr. GRPO is also a loss", "loss_agg_mode=seq-mean-token-sum-norm"),
    ),
    "gdpo with KL in the reward": (
        ("algorithm.adv_estimator=gdpo", KEYS, "algorithm.use_kl_in_reward=True"),
        ("algorithm.use_kl_in_reward=True cannot be honoured by gdpo", "actor_rollout_ref.actor.use_kl_loss=True"),
    ),
    "dgpo without the division it does not make": (
        ("algorithm.adv_estimator=dgpo", "algorithm.norm_adv_by_std_in_grpo=False"),
        ("norm_adv_by_std_in_grpo=False has no effect on dgpo", "set +algorithm.dgpo.dgae=False"),
    ),
    "a list without steps": (
        ("algorithm.adv_estimator=compose",),
        ("needs a list of steps: set +algorithm.compose.steps",),
    ),
    "a filter by rewards without their names": (
        (
            "algorithm.adv_estimator=dgpo",
            "++algorithm.filter_groups.enable=True",
            "++algorithm.filter_groups.metric=any_reward",
        ),
        ("algorithm.filter_groups.metric=any_reward needs the names of the rewards",),
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
        ("algorithm.compose.steps[1]: unknown step 'center' (did you mean 'centre'?)",),
    ),
    "a step in the wrong place": (
        ("algorithm.adv_estimator=compose", KEYS, "+algorithm.compose.steps=[scale_by_std,centre,weigh_and_sum]"),
        ("algorithm.compose.steps[0]: scale_by_std must come after centre",),
    ),
    "a setting of a step that does not exist": (
        ("algorithm.adv_estimator=compose", "+algorithm.compose.steps=[weigh_and_sum,{step:whiten,by:token}]"),
        ("algorithm.compose.steps[1] (whiten): unknown setting 'by'",),
    ),
    "a step of one's own that is nowhere": (
        ("algorithm.adv_estimator=compose", "+algorithm.compose.steps=[weigh_and_sum,no_package.steps:Clip]"),
        ("'no_package.steps' of 'no_package.steps:Clip' cannot be imported", "on the node where verl's trainer runs"),
    ),
    "a step of one's own that does not hold": (
        (
            "algorithm.adv_estimator=compose",
            "+algorithm.compose.steps=[weigh_and_sum,tests.integration.own_steps:Broken]",
        ),
        ("step 'broken' (tests.integration.own_steps:Broken), tried on a made-up batch", "raises KeyError: 'hard'"),
    ),
    "a list that needs the rewards' names": (
        ("algorithm.adv_estimator=compose", "+algorithm.compose.steps=[centre,weigh_and_sum]"),
        ("compose normalises each reward separately", "set +algorithm.rewards.keys=[...]"),
    ),
    "a condition of a list on a reward that is no key": (
        (
            "algorithm.adv_estimator=compose",
            KEYS,
            "+algorithm.compose.steps=[{step:condition,conditions:{format:{on:accu,at_least:1}}},weigh_and_sum]",
        ),
        ("algorithm.compose.steps: condition: unknown reward 'accu' (did you mean 'acc'?)",),
    ),
    "a setting of another anchor": (
        ("algorithm.adv_estimator=hadw", "+algorithm.hadw={anchor: window, eta: 0.2}"),
        (
            "algorithm.hadw.eta=0.2 has no effect with algorithm.hadw.anchor=window",
            "remove it, or set algorithm.hadw.anchor=soft",
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_what_was_found_and_what_to_change(case: str) -> None:
    overrides, parts = REFUSED[case]
    message = refusal(*overrides)
    name = next(override.partition("=")[2] for override in overrides if override.startswith("algorithm.adv_estimator"))
    assert message.startswith(f"algorithm.adv_estimator={name} cannot run as configured:\n  - ")
    for part in parts:
        assert part in message


def test_all_that_is_wrong_is_said_at_once() -> None:
    message = refusal("algorithm.adv_estimator=gdpo", "algorithm.use_kl_in_reward=True")
    assert message.count("\n  - ") == 2
    assert "cannot be honoured by gdpo" in message
    assert "set +algorithm.rewards.keys" in message


def test_what_a_message_says_to_add_can_be_added_as_it_stands() -> None:
    wrong = ("algorithm.adv_estimator=drgrpo", "data.max_response_length=3000")
    add, on_purpose = refusal(*wrong).split(". Add ")[1].split(" (or ")
    check_run(compose(*wrong, *add.split()))
    check_run(compose(*wrong, on_purpose.split()[0]))


def test_settings_that_a_preset_brought_are_named_without_a_plus() -> None:
    with pytest.raises(ConfigurationError, match=r"set algorithm\.rewards\.keys=\[\.\.\.\]"):
        check_run(compose("+verl_ext=gdpo"))


def test_a_misspelt_section_is_refused() -> None:
    message = refusal("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.gdop.whiten=token")
    assert "algorithm.gdop is unknown and would be ignored: did you mean algorithm.gdpo?" in message


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
    expected = f"is unknown and would be ignored: did you mean {meant}?"
    assert expected in refusal("algorithm.adv_estimator=gdpo", KEYS, f"+algorithm.{written}")
    (message,) = warnings_of(caplog, "algorithm.adv_estimator=grpo", f"+algorithm.{written}")
    assert expected in message


@pytest.mark.parametrize("name", ["my_grpo", "grpo_v2"])
def test_a_name_that_resembles_ours_may_be_the_user_s_own(name: str) -> None:
    check_run(compose(f"algorithm.adv_estimator={name}"), unregistered=True)


@pytest.mark.parametrize("name", ["GDPO", "null"])
def test_a_name_in_capitals_or_none_is_refused_in_the_driver(name: str) -> None:
    with pytest.raises(ConfigurationError, match="unknown estimator"):
        check_run(compose(f"algorithm.adv_estimator={name}"), unregistered=True)


def test_a_section_of_verl_s_own_is_not_taken_for_a_misspelling() -> None:
    check_run(compose("algorithm.adv_estimator=gdpo", KEYS, "+algorithm.rollout_correction.mine=1"))


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
        "needs token: set algorithm.dgpo.balance=auto",
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
        "whose mean needs token: write {step: balance, over: token}",
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
        "not read, since algorithm.adv_estimator=grpo is not verl_ext's: algorithm.gdpo: unknown setting 'mine'",
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


def test_a_name_of_the_user_s_own_may_be_registered_where_the_trainer_runs(caplog: pytest.LogCaptureFixture) -> None:
    config = compose("algorithm.adv_estimator=my_method")
    with caplog.at_level(logging.WARNING, "verl_ext"):
        check_run(config, unregistered=True)
    assert "my_method is not registered yet" in caplog.text
    with pytest.raises(ConfigurationError, match="unknown estimator 'my_method'"):
        check_run(config)
    with pytest.raises(ConfigurationError, match="did you mean 'hadw'"):
        check_run(compose("algorithm.adv_estimator=hadww"), unregistered=True)


@pytest.mark.parametrize("name", ["dgpo", "drgrpo", "gdpo", "hadw"])
@pytest.mark.parametrize("form", ["primary", "group"])
def test_a_preset_sets_the_estimator_and_its_settings(name: str, form: str) -> None:
    config = compose(config_name=name) if form == "primary" else compose(f"+verl_ext={name}")
    assert config.algorithm.adv_estimator == name
    assert config.algorithm[name] is not None
    assert config.algorithm.rewards["keys"] is None
    # All of verl's own is there.
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 256
    assert config.algorithm.gamma == 1.0


@pytest.mark.parametrize("form", ["primary", "group"])
def test_the_drgrpo_preset_brings_its_loss(form: str) -> None:
    overrides = ("data.max_response_length=3000",)
    config = compose(*overrides, config_name="drgrpo") if form == "primary" else compose("+verl_ext=drgrpo", *overrides)
    actor = config.actor_rollout_ref.actor
    assert (actor.loss_agg_mode, actor.loss_scale_factor) == ("seq-mean-token-sum-norm", 3000)
    assert actor.use_kl_loss is False
    check_run(config)


@pytest.mark.parametrize("form", ["primary", "group"])
def test_settings_of_a_preset_need_no_plus_and_a_typo_is_refused(form: str) -> None:
    def composed(*overrides: str):
        if form == "primary":
            return compose(*overrides, config_name="hadw")
        return compose("+verl_ext=hadw", *overrides)

    config = composed("algorithm.hadw.base=gdpo", "algorithm.gdpo.whiten=token", "algorithm.rewards.keys=[acc,format]")
    check_run(config)
    assert (config.algorithm.hadw.base, config.algorithm.gdpo.whiten) == ("gdpo", "token")
    with pytest.raises(Exception, match=re.escape("algorithm.hadw.lambda_scal")) as caught:
        composed("algorithm.hadw.lambda_scal=1.5")
    assert type(caught.value).__module__.startswith("hydra.")


def test_several_presets_can_be_put_together() -> None:
    config = compose("+verl_ext=[cpu,gdpo]", "algorithm.rewards.keys=[acc,format]")
    assert config.algorithm.adv_estimator == "gdpo"
    assert config.trainer.device == "cpu"
    check_run(config)


def test_a_preset_s_defaults_are_the_settings_defaults() -> None:
    from verl_ext.integration.config.read import read_settings
    from verl_ext.settings import Settings

    assert read_settings(compose(config_name="hadw").algorithm) == Settings()


def test_a_plain_file_of_the_user_works(tmp_path) -> None:
    """A primary configuration of one's own, with verl's as its base and our settings in plain YAML."""
    import hydra

    (tmp_path / "mine.yaml").write_text(
        "hydra: {searchpath: ['pkg://verl.trainer.config']}\n"
        "defaults: [ppo_trainer, _self_]\n"
        "algorithm:\n"
        "  adv_estimator: gdpo\n"
        "  rewards: {keys: [acc, format], weights: [1, 0.5]}\n"
        "  gdpo: {whiten: token, conditions: {format: {on: acc, at_least: 1}}}\n"
    )
    with hydra.initialize_config_dir(str(tmp_path), version_base=None):
        config = hydra.compose("mine")
    check_run(config)
    from verl_ext.core.steps import Requirement
    from verl_ext.estimators.gdpo import GdpoSettings
    from verl_ext.integration.config.read import read_settings

    settings = read_settings(config.algorithm)
    assert settings.rewards.weights == (1.0, 0.5)
    gdpo = settings.of(GdpoSettings)
    assert gdpo.whiten == "token"
    assert gdpo.conditions["format"] == Requirement("acc", 1.0)


def test_the_estimator_s_name_may_be_verl_s_enum() -> None:
    from verl.trainer.ppo.core_algos import AdvantageEstimator

    config = compose(KEYS)
    config.algorithm.adv_estimator = AdvantageEstimator.GDPO
    check_run(config)
    config = compose()
    config.algorithm.adv_estimator = AdvantageEstimator.GDPO
    with pytest.raises(ConfigurationError, match=r"adv_estimator=gdpo cannot run"):
        check_run(config)
