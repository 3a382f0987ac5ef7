"""The presets, as primary configurations and in the group `verl_ext`."""

from __future__ import annotations

import re

import pytest

from tests.integration.configs import compose
from verl_ext.integration.config.checks import check_run


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
