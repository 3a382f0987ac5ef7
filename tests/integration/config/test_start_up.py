"""What would end a run after its first rollout, or in a traceback of verl's or Ray's, is refused at start-up."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from tests.facts import says
from tests.integration.config.judged import ONE_UPDATE, refusal
from tests.integration.configs import compose
from verl_ext.errors import ConfigurationError
from verl_ext.integration.compat import contract
from verl_ext.integration.config import checks, verl_settings
from verl_ext.integration.config.checks import check_run

GDPO = ("+verl_ext=gdpo", "algorithm.rewards.keys=[acc,format]")
VARIABLES = "ray_kwargs.ray_init.runtime_env.env_vars"


def scorer(module: str, *overrides: str) -> tuple[str, ...]:
    return (f"reward.custom_reward_function.path=pkg://verl_ext.rewards.{module}", *overrides)


# -- rewards by name -------------------------------------------------------------------------------------------------


COMPONENTS = {
    "a misspelt key": (
        ("+verl_ext=gdpo", "algorithm.rewards.keys=[corectness,format]", *scorer("gsm8k")),
        ("algorithm.rewards.keys", "'corectness'", "did you mean 'correctness'", "'format', 'integer', 'score'"),
    ),
    "verl's own name for the keys": (
        ("algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[formt]", *scorer("gsm8k")),
        ("algorithm.gdpo_reward_keys", "'formt'", "did you mean 'format'"),
    ),
    "an accuracy that nobody returns": (
        ("+verl_ext=dgpo", *ONE_UPDATE, "algorithm.rewards.accuracy_key=nope", *scorer("boxed_math")),
        ("algorithm.rewards.accuracy_key", "'nope'", "'accuracy', 'score'"),
    ),
    "an accuracy of hadw": (
        ("+verl_ext=hadw", "algorithm.rewards.accuracy_key=acuracy", *scorer("boxed_math")),
        ("algorithm.rewards.accuracy_key", "did you mean 'accuracy'"),
    ),
    "a component that was not asked for": (
        ("+verl_ext=gdpo", "algorithm.rewards.keys=[format,length]", *scorer("tool_calling")),
        ("algorithm.rewards.keys", "'length'", "'correctness', 'format', 'score'"),
    ),
    "rewards that are only logged": (
        ("algorithm.adv_estimator=grpo", "+algorithm.rewards.keys=[corectness]", *scorer("gsm8k")),
        ("algorithm.rewards.keys", "did you mean 'correctness'"),
    ),
    "an empty name": (
        ("+verl_ext=gdpo", "algorithm.rewards.keys=['',x]"),
        ("algorithm.rewards.keys", "['', 'x']"),
    ),
    "a field of verl's batch": (
        ("+verl_ext=gdpo", "algorithm.rewards.keys=[uid,score]"),
        ("algorithm.rewards.keys", "'uid'"),
    ),
    "a field of verl's batch as the accuracy": (
        ("+verl_ext=dgpo", *ONE_UPDATE, "algorithm.rewards.accuracy_key=index"),
        ("algorithm.rewards.accuracy_key", "'index'"),
    ),
    "no weight at all": (
        (*GDPO, "algorithm.rewards.weights=[0,0.0]"),
        ("algorithm.rewards.weights=[0.0, 0.0]",),
    ),
}


@pytest.mark.parametrize("case", COMPONENTS)
def test_rewards_that_cannot_be_there_are_refused(case: str) -> None:
    overrides, parts = COMPONENTS[case]
    message = refusal(*overrides)
    for part in parts:
        assert part in message


THERE = {
    "the components and the score": ("algorithm.rewards.keys=[correctness,format,integer,score]", *scorer("gsm8k")),
    "a weight of 0 beside another": (
        "algorithm.rewards.keys=[correctness,format]",
        "algorithm.rewards.weights=[0,1]",
        *scorer("gsm8k"),
    ),
    "a component that was asked for": (
        "algorithm.rewards.keys=[format,length]",
        *scorer("tool_calling", "+reward.custom_reward_function.reward_kwargs.length=fixed"),
    ),
    "what verl's manager adds": (
        "algorithm.rewards.keys=[format,overlong_reward]",
        *scorer("gsm8k", "reward.reward_manager.name=dapo"),
    ),
    "a reward model beside the scorer": (
        "algorithm.rewards.keys=[format,helpful]",
        *scorer("gsm8k", "reward.reward_model.enable=True"),
    ),
    "a reward manager of the user's": (
        "algorithm.rewards.keys=[format,helpful]",
        *scorer("gsm8k", "reward.reward_manager.source=importlib"),
    ),
    "a reward function of the user's": (
        "algorithm.rewards.keys=[corectness]",
        "reward.custom_reward_function.path=/my/rewards.py",
    ),
}


@pytest.mark.parametrize("case", THERE)
def test_rewards_that_may_be_there_are_not_refused(case: str) -> None:
    check_run(compose("+verl_ext=gdpo", *THERE[case]))


# -- the estimator's name --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["GDPO", "AdvantageEstimator.GDPO", "Gdpo", "[gdpo]", "gdop"])
def test_another_way_to_write_an_estimator_is_refused_in_the_driver(written: str) -> None:
    message = refusal(f"algorithm.adv_estimator={written}")
    assert says(message, "did you mean 'gdpo'", "'compose', 'dgpo', 'drgrpo'")


@pytest.mark.parametrize("written", ["''", "null", "[]", "3"])
def test_what_is_no_name_is_refused_in_the_driver(written: str) -> None:
    assert says(refusal(f"algorithm.adv_estimator={written}"), "'compose', 'dgpo', 'drgrpo'")


# -- settings of verl's ----------------------------------------------------------------------------------------------

WRONG = {
    "trainer.save_freq=abc": "'abc'",
    "trainer.save_freq=null": "None",
    "trainer.test_freq=often": "'often'",
    "trainer.test_freq=null": "None",
    "trainer.test_freq=10.0": "write 10",
    "trainer.total_training_steps=abc": "'abc'",
    "trainer.total_epochs='3'": "'3'",
    "trainer.total_epochs=null": "None",
    "trainer.nnodes=two": "'two'",
    "trainer.n_gpus_per_node=1.5": "1.5",
    "trainer.resume_mode=atuo": "did you mean 'auto'",
    "trainer.use_v1=maybe": "'maybe'",
    "trainer.default_local_dir=[a]": "['a']",
    "data.train_batch_size='8'": "'8'",
    "data.max_response_length=long": "'long'",
    "actor_rollout_ref.rollout.n=some": "'some'",
    "actor_rollout_ref.actor.ppo_mini_batch_size=x": "'x'",
    "actor_rollout_ref.actor.use_kl_loss=no way": "'no way'",
}


@pytest.mark.parametrize("override", WRONG)
def test_a_setting_of_verl_s_that_we_read_has_its_type(override: str, caplog: pytest.LogCaptureFixture) -> None:
    path = override.partition("=")[0]
    message = refusal(*GDPO, override)
    assert path in message
    assert WRONG[override] in message
    with caplog.at_level(logging.WARNING, "verl_ext"):  # under an estimator of verl's, verl decides
        check_run(compose("algorithm.adv_estimator=grpo", override))
    assert path in caplog.text


@pytest.mark.parametrize("estimator", ["gdpo", "grpo"])
def test_a_dump_s_folder_that_cannot_be_made_here_is_warned_of(
    estimator: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    dump = f"algorithm.verl_ext.dump_dir={tmp_path}/file/dump"
    check_run(compose("algorithm.adv_estimator=grpo", f"+{dump}"))  # which dumps nothing
    assert not says(caplog.text, dump)
    check_run(compose(f"algorithm.adv_estimator={estimator}", "+algorithm.rewards.keys=[acc,format]", f"+{dump}"))
    assert says(caplog.text, dump, f"{tmp_path}/file:", "Not a directory", "algorithm.verl_ext.dump_dir=null")


@pytest.mark.parametrize("estimator", ["gdpo", "grpo"])
def test_a_folder_for_checkpoints_that_cannot_be_made_here_is_warned_of(
    estimator: str, caplog: pytest.LogCaptureFixture
) -> None:
    home = "trainer.default_local_dir=/dev/null/x"
    given = (f"algorithm.adv_estimator={estimator}", "+algorithm.rewards.keys=[acc,format]", home)
    check_run(compose(*given))  # which saves nothing
    assert not says(caplog.text, home)
    check_run(compose(*given, "trainer.save_freq=5"))
    assert says(caplog.text, home, "/dev/null:", "Not a directory", "trainer.save_freq=-1")


def test_verl_s_own_configurations_have_the_types_that_we_expect() -> None:
    for name in ("ppo_trainer", "ppo_megatron_trainer"):
        assert list(checks.wrong_types(compose(config_name=name))) == []
    assert set(verl_settings.KINDS) - set(contract.SETTINGS) == set()


# -- one error does not hide another ---------------------------------------------------------------------------------


def test_an_estimator_that_cannot_be_built_at_all_does_not_lose_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def build(name: str, settings: object) -> None:
        tried.append(settings)
        raise ConfigurationError(f"attempt {len(tried)} of {name} fails")

    monkeypatch.setattr(checks, "build", build)
    message = refusal(*GDPO, "+algorithm.gdop.whiten=token")
    assert len(tried) == 2
    for part in ("did you mean algorithm.gdpo", "attempt 1 of gdpo fails", "attempt 2 of gdpo fails"):
        assert part in message


def test_a_setting_that_cannot_be_read_does_not_lose_the_rest() -> None:
    message = refusal(
        "+verl_ext=gdpo", "+algorithm.gdop.whiten=token", "actor_rollout_ref.actor.policy_loss.loss_mode=${nowhere}"
    )
    assert says(message, "did you mean algorithm.gdpo", "policy_loss.loss_mode", "'nowhere'")
    assert says(message, "algorithm.rewards.keys=[...]")


# -- Ray's environment variables -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"), [("2", "2"), ("true", "true"), ("False", "false"), ("0.5", "0.5"), ("null", "")]
)
@pytest.mark.parametrize("estimator", ["gdpo", "grpo"])
def test_a_variable_that_is_no_text_is_refused_with_the_spelling_that_works(
    written: str, meant: str, estimator: str
) -> None:
    from omegaconf import OmegaConf
    from ray.runtime_env import RuntimeEnv

    rest = (f"algorithm.adv_estimator={estimator}", "+algorithm.rewards.keys=[acc,format]")
    override = f"++{VARIABLES}.OMP_NUM_THREADS={written}"
    with pytest.raises(TypeError):
        RuntimeEnv(env_vars=OmegaConf.to_container(OmegaConf.select(compose(*rest, override), VARIABLES)))
    message = refusal(*rest, override)
    (spelling,) = re.findall(r'"(\+\+[^"]*)"', message)
    config = compose(*rest, spelling)
    check_run(config)
    assert RuntimeEnv(env_vars=OmegaConf.to_container(OmegaConf.select(config, VARIABLES)))["env_vars"] == {
        "OMP_NUM_THREADS": meant
    }


def test_variables_that_are_no_section_are_refused() -> None:
    assert VARIABLES in refusal(*GDPO, f"++{VARIABLES}=[OMP_NUM_THREADS]")
