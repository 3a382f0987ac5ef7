"""The presets, as primary configurations and in the group `verl_ext`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.configs import compose
from verl_ext.integration.config.checks import check_run
from verl_ext.integration.config.read import read_settings
from verl_ext.registry import BUILT_IN, declaration
from verl_ext.settings import Settings


@pytest.fixture(params=["primary", "group"])
def composed(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """The configuration with a preset, in one of both ways."""

    def call(name: str, *overrides: str) -> Any:
        if request.param == "primary":
            return compose(*overrides, config_name=name)
        return compose(f"+verl_ext={name}", *overrides)

    return call


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_preset_sets_the_estimator_and_its_settings(name: str, composed: Callable[..., Any]) -> None:
    config = composed(name)
    assert config.algorithm.adv_estimator == name
    assert (name in config.algorithm) == (declaration(name).section is not None)
    assert config.algorithm.rewards["keys"] is None
    # All of verl's own is there.
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 256
    assert config.algorithm.gamma == 1.0


def test_the_drgrpo_preset_brings_its_loss(composed: Callable[..., Any]) -> None:
    config = composed("drgrpo", "data.max_response_length=3000")
    actor = config.actor_rollout_ref.actor
    assert (actor.loss_agg_mode, actor.loss_scale_factor) == ("seq-mean-token-sum-norm", 3000)
    assert actor.use_kl_loss is False
    check_run(config)


def test_settings_of_a_preset_need_no_plus_and_a_typo_is_refused(composed: Callable[..., Any]) -> None:
    settings = ("algorithm.hadw.base=gdpo", "algorithm.gdpo.whiten=token", "algorithm.rewards.keys=[acc,format]")
    config = composed("hadw", *settings)
    check_run(config)
    assert (config.algorithm.hadw.base, config.algorithm.gdpo.whiten) == ("gdpo", "token")
    with pytest.raises(Exception, match=re.escape("algorithm.hadw.lambda_scal")) as caught:
        composed("hadw", "algorithm.hadw.lambda_scal=1.5")
    assert type(caught.value).__module__.startswith("hydra.")


def test_a_preset_s_defaults_are_the_settings_defaults() -> None:
    assert read_settings(compose(config_name="hadw").algorithm) == Settings()
