"""What the checks say of a configuration."""

from __future__ import annotations

import logging

import pytest

from tests.integration.configs import compose
from verl_ext.errors import ConfigurationError
from verl_ext.integration.config.checks import check_run

KEYS = "+algorithm.rewards.keys=[acc,format]"
DRGRPO_LOSS = (
    "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
    "actor_rollout_ref.actor.loss_scale_factor=3000",
)
ONE_UPDATE = ("data.train_batch_size=256", "actor_rollout_ref.actor.ppo_mini_batch_size=256")


def refusal(*overrides: str) -> str:
    """What the driver says."""
    with pytest.raises(ConfigurationError) as caught:
        check_run(compose(*overrides), unregistered=True)
    return str(caught.value)


def warnings_of(caplog: pytest.LogCaptureFixture, *overrides: str) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "verl_ext"):
        check_run(compose(*overrides))
    return [record.getMessage() for record in caplog.records if record.name == "verl_ext"]
