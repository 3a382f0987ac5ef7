"""verl's whole configuration for a case; composed once, because that takes most of the time."""

from __future__ import annotations

import copy
import functools
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from tests.golden.cases import Case
from tests.integration.configs import compose


@functools.cache
def _base() -> DictConfig:
    return compose("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")


def config_for(case: Case) -> Any:
    """The same object for every case: a trainer reads it when it is built."""
    config = _base()
    with open_dict(config):
        config.algorithm = OmegaConf.merge(_algorithm(), case.algorithm, {"adv_estimator": case.estimator})
        config.actor_rollout_ref.actor.loss_agg_mode = case.loss
    return config


@functools.cache
def _algorithm() -> DictConfig:
    algorithm = copy.deepcopy(_base().algorithm)
    OmegaConf.set_struct(algorithm, False)
    return algorithm
