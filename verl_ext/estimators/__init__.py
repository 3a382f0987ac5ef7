"""The estimators by name. To add one: a file with a function from `Settings` to `Chain`, and a line here.

The line says where the function is; it is imported when the estimator is first built, because this list is read in
every process of a run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from verl_ext.errors import ConfigurationError, unknown

if TYPE_CHECKING:
    from verl_ext.core.chain import Chain
    from verl_ext.settings import Settings

ESTIMATORS: Mapping[str, str] = MappingProxyType(
    {
        "compose": "verl_ext.estimators.compose:compose",
        "dgpo": "verl_ext.estimators.dgpo:dgpo",
        "drgrpo": "verl_ext.estimators.drgrpo:drgrpo",
        "gdpo": "verl_ext.estimators.gdpo:gdpo",
        "hadw": "verl_ext.estimators.hadw:hadw",
    }
)

__all__ = ["ESTIMATORS", "build"]


def build(name: str, settings: Settings) -> Chain:
    """The steps of an estimator under the given settings.

    >>> from verl_ext.settings import Settings
    >>> [step.name for step in build("drgrpo", Settings()).steps]
    ['weigh_and_sum', 'centre']
    """
    if name not in ESTIMATORS:
        raise ConfigurationError(unknown("estimator", name, ESTIMATORS))
    module, function = ESTIMATORS[name].split(":")
    make: Callable[[Settings], Chain] = getattr(importlib.import_module(module), function)
    return make(settings)
