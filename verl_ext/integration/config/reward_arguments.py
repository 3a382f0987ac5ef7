"""Check the arguments and the components of the configured reward function, if it is one of ours.

verl's default trainer logs the exception of a reward function and drops the sample. With a wrong argument it would
never fill a batch. A wrong name of a component would end the run after the first rollout.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from omegaconf import OmegaConf

from verl_ext import rewards
from verl_ext.errors import ConfigurationError, listed, unknown
from verl_ext.integration.components import RESERVED, SCORE
from verl_ext.integration.config.read import readable, select
from verl_ext.settings import Settings

FUNCTION = "reward.custom_reward_function"
PACKAGE = rewards.__name__

# verl's own reward managers, with the components that each adds to those of the reward function.
_MANAGERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"naive": (), "gdpo": (), "remote": (), "rate_limited": (), "dapo": ("overlong", "overlong_reward")}
)


def wrong_arguments(config: Any) -> Iterator[str]:
    """Messages about the configured reward function, if it is one of ours."""
    path, name = _configured(config)
    if name is None:
        return
    scorers = _scorers()
    if name not in scorers:
        yield f"{FUNCTION}.path={path}: {unknown('reward module', name, scorers)}"
        return
    function = select(config, f"{FUNCTION}.name")
    if function != "compute_score":
        yield f"{FUNCTION}.name={function}: {name} has no such function; set {FUNCTION}.name=compute_score"
        return
    try:
        import_module(name).check_kwargs(_arguments(config))
    except ConfigurationError as error:
        yield str(error)


def wrong_components(config: Any, settings: Settings) -> Iterator[str]:
    """Messages about settings that name a component which the run cannot have."""
    valid = known_components(config)
    wanted = [("algorithm.rewards.keys", key) for key in settings.rewards.keys or ()]
    if settings.rewards.accuracy_key is not None:
        wanted.append(("algorithm.rewards.accuracy_key", settings.rewards.accuracy_key))
    for setting, key in wanted:
        if key in RESERVED:
            yield (
                f"{setting}: {key!r} is a field of verl's batch and cannot be a reward: rename the component in the "
                "reward function"
            )
        elif valid is not None and key not in valid:
            path = select(config, f"{FUNCTION}.path")
            yield f"{setting}: {unknown('reward component', key, valid)} (what {FUNCTION}.path={path} returns)"


def wrong_accuracy(config: Any, settings: Settings) -> Iterator[str]:
    """A component of our scorers that is taken for an accuracy, but does not lie in [0, 1]."""
    valid = known_components(config)
    key = settings.rewards.accuracy_key or SCORE
    if valid is None or key not in valid or settings.rewards.accuracy_threshold is not None:
        return
    module = _scorer(config)
    accuracies = () if module is None else module.accuracies(_arguments(config))
    # What a reward manager adds is not the scorer's.
    if key not in accuracies and module is not None and key in (*module.components(_arguments(config)), SCORE):
        path = select(config, f"{FUNCTION}.path")
        chosen = f"set algorithm.rewards.accuracy_key=... to one that does ({listed(accuracies)}), or "
        remedy = chosen if accuracies else "none of its components does; set "
        yield (
            f"the accuracy is {key!r}{'' if settings.rewards.accuracy_key else ' by default'}, but {key!r} of "
            f"{FUNCTION}.path={path} does not lie in [0, 1]: {remedy}algorithm.rewards.accuracy_threshold=..., above "
            "which it counts as right"
        )


def known_components(config: Any) -> list[str] | None:
    """All components of a run, including `score`; None if code that is not ours or verl's may add to them.

    Such code is the user's reward function, reward manager or reward model.
    """
    module = _scorer(config)
    manager = select(config, "reward.reward_manager.name") or "naive"
    source = select(config, "reward.reward_manager.source") or "register"
    reward_model = select(config, "reward.reward_model.enable")
    if module is None or reward_model or source != "register" or manager not in _MANAGERS:
        return None
    try:
        return [*module.components(_arguments(config)), *_MANAGERS[manager], SCORE]
    except ConfigurationError:  # `wrong_arguments` reports it
        return None


def _scorers() -> list[str]:
    """Our modules with a reward function."""
    names = [f"{PACKAGE}.{module.name}" for module in pkgutil.iter_modules(rewards.__path__)]
    return [name for name in names if hasattr(import_module(name), "compute_score")]


def _scorer(config: Any) -> ModuleType | None:
    """The module of the configured reward function, if it is one of ours."""
    _, name = _configured(config)
    if name not in _scorers() or select(config, f"{FUNCTION}.name") != "compute_score":
        return None
    return import_module(str(name))


def _configured(config: Any) -> tuple[str, str | None]:
    """The path in the configuration (`pkg://...` or a file), and the name of our module there, or None."""
    path = str(select(config, f"{FUNCTION}.path") or "")
    if path.startswith("pkg://"):
        name = path.removeprefix("pkg://").replace("/", ".")
        return path, name if name.startswith(f"{PACKAGE}.") else None
    try:
        file = Path(path.removeprefix("file://")).resolve()
    except ValueError:  # not a valid path, which verl reports
        return path, None
    ours = path and file.parent in (Path(at).resolve() for at in rewards.__path__)
    return path, f"{PACKAGE}.{file.stem}" if ours else None


def _arguments(config: Any) -> Mapping[str, Any]:
    """The keyword arguments that verl passes to the reward function."""
    section = select(config, f"{FUNCTION}.reward_kwargs")
    with readable(f"{FUNCTION}.reward_kwargs"):
        kwargs: Any = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ConfigurationError(f"{FUNCTION}.reward_kwargs must be a section of settings, found {kwargs!r}")
    return {str(name): value for name, value in (kwargs or {}).items()}
