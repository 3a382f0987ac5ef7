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
    if not chain.steps:
        raise ConfigurationError(
            f"algorithm.adv_estimator={name} builds a chain without steps: add weigh_and_sum to it"
        )
    return chain
