"""The estimators, one file each; `verl_ext.registry` lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_ext.errors import ConfigurationError
from verl_ext.registry import ESTIMATORS, load

if TYPE_CHECKING:
    from verl_ext.core.chain import Chain
    from verl_ext.settings import Settings


def build(name: str, settings: Settings) -> Chain:
    """Build the chain of an estimator from the settings.

    >>> from verl_ext.settings import Settings
    >>> [step.name for step in build("drgrpo", Settings()).steps]
    ['weigh_and_sum', 'centre']
    """
    from verl_ext.core.chain import Chain

    chain = load(name)(settings)
    if not isinstance(chain, Chain):
        raise ConfigurationError(f"the estimator {name!r}, {ESTIMATORS[name]}, returns {chain!r}, expected a Chain")
    if settings.kl_in_reward:
        _refuse_kl(name, chain)
    return chain


def _refuse_kl(name: str, chain: Chain) -> None:
    """Raise if KL cannot be a part of the reward of these steps."""
    if chain.per_reward:
        why = "which works on each reward separately: KL is added to one combined reward"
    elif any(step.name == "divide_by_mean" for step in chain.steps):
        why = "which needs rewards of at least 0: KL may make them negative"
    else:
        return
    raise ConfigurationError(
        f"algorithm.use_kl_in_reward=True does not work with {name}, {why}; set use_kl_in_reward=False and, to "
        "keep a KL term, actor_rollout_ref.actor.use_kl_loss=True"
    )
