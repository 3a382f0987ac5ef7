"""The estimators, one file each; `verl_ext.registry` lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    return load(name).chain(settings)
