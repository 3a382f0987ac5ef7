"""The estimators, one file each; `verl_ext.registry` lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_ext.errors import ConfigurationError
from verl_ext.registry import load

if TYPE_CHECKING:
    from verl_ext.core.chain import Chain
    from verl_ext.settings import Settings


def build(name: str, settings: Settings) -> Chain:
    """Build the chain of an estimator from the settings.

    >>> from verl_ext.settings import Settings
    >>> [step.name for step in build("drgrpo", Settings()).steps]
    ['weigh_and_sum', 'centre']
    """
    chain = load(name).chain(settings)
    why = None
    if settings.kl_in_reward and chain.per_reward:
        why = "which works on each reward separately: KL is added to one combined reward"
    elif settings.kl_in_reward and any(step.name == "divide_by_mean" for step in chain.steps):
        why = "which needs rewards of at least 0: KL may make them negative"
    if why is not None:
        raise ConfigurationError(
            f"algorithm.use_kl_in_reward=True does not work with {name}, {why}; set use_kl_in_reward=False and, to "
            "keep a KL term, actor_rollout_ref.actor.use_kl_loss=True"
        )
    return chain
