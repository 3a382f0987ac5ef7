"""The arguments of our own reward functions, checked before training.

verl's default trainer logs the exception of a reward function and goes on without the sample, so a wrong argument would
otherwise end in a run that never gets a batch together.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import OmegaConf

from verl_ext import rewards
from verl_ext.errors import ConfigurationError, unknown
from verl_ext.integration.config import readable, select

FUNCTION = "reward.custom_reward_function"
PACKAGE = rewards.__name__


def wrong_arguments(config: Any) -> Iterator[str]:
    """What is wrong with the configured reward function, if it is one of this package's; nothing for any other."""
    path = select(config, f"{FUNCTION}.path")
    name = _module_name(str(path)) if path else None
    if name is None:
        return
    scorers = [f"{PACKAGE}.{found.name}" for found in pkgutil.iter_modules(rewards.__path__)]
    scorers = [scorer for scorer in scorers if hasattr(import_module(scorer), "compute_score")]
    if name not in scorers:
        yield f"{FUNCTION}.path={path}: {unknown('reward module', name, scorers)}"
        return
    module = import_module(name)
    function = select(config, f"{FUNCTION}.name")
    if function != "compute_score":
        yield f"{FUNCTION}.name={function}: {name} has no such reward; set {FUNCTION}.name=compute_score"
        return
    try:
        _check(module, select(config, f"{FUNCTION}.reward_kwargs"))
    except ConfigurationError as error:
        yield str(error)


def _module_name(path: str) -> str | None:
    """The module of ours that verl would load from a path: `pkg://...`, or a file."""
    if path.startswith("pkg://"):
        name = path.removeprefix("pkg://").replace("/", ".")
        return name if name.startswith(f"{PACKAGE}.") else None
    try:
        file = Path(path.removeprefix("file://")).resolve()
    except ValueError:  # no path at all, which verl says
        return None
    return f"{PACKAGE}.{file.stem}" if file.parent in (Path(at).resolve() for at in rewards.__path__) else None


def _check(module: ModuleType, found: Any) -> None:
    with readable(f"{FUNCTION}.reward_kwargs"):
        kwargs = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ConfigurationError(f"{FUNCTION}.reward_kwargs must be a section of settings, found {kwargs!r}")
    module.check_kwargs(kwargs or {})
