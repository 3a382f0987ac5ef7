"""Read the configuration of a run from verl's objects, and find out which package computes its estimator.

verl_ext does not change verl's registry: an estimator that another package registers there takes precedence.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from omegaconf import OmegaConf

from verl_ext import rewards
from verl_ext.conf import SELECTED_PRESETS
from verl_ext.core.schema import parse_dataclass
from verl_ext.errors import ConfigurationError, explaining_errors
from verl_ext.registry import ADDED_ESTIMATORS, default_section, entries_read, sections
from verl_ext.settings import ACCURACY_BETWEEN, ANY_REWARD, COMMON, VERL_NAMES, Settings, entries_set

ESTIMATOR = "algorithm.adv_estimator"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
FILTER = "algorithm.filter_groups"
FUNCTION = "reward.custom_reward_function"
CORE = "verl.trainer.ppo.core_algos"
"""The module of verl with its registry of estimators."""


def has_algorithm(config: Any) -> bool:
    """Return whether a configuration has the section `algorithm`, without which verl_ext has nothing to read."""
    return OmegaConf.is_dict(config) and OmegaConf.is_dict(config.get("algorithm"))


def entries_in_use(config: Any) -> Iterator[str]:
    """Yield the entries of a configuration with which a run uses verl_ext. A run without any does not use it.

    A run uses verl_ext if at least one of these is true:

    - verl_ext computes the estimator `algorithm.adv_estimator`. If another package registers an estimator of this name
      with verl, that package computes it;
    - a preset of verl_ext is selected, as with `+verl_ext=gdpo`, or the section `algorithm.verl_ext` is set;
    - `algorithm.filter_groups` is enabled with a metric of verl_ext, `any_reward` or `accuracy_between`;
    - the reward function is a module of `verl_ext.rewards`;
    - another section of verl_ext below `algorithm`, for example `algorithm.rewards`, can be read and differs from its
      defaults. A section that cannot be read may belong to another package. If another package registers an estimator
      with verl, the section with the estimator's name belongs to that package.
    """
    if computed_by_verl_ext(estimator_name(config)):
        yield ESTIMATOR
    for path in (SELECTED_PRESETS, "algorithm.verl_ext"):
        if select(config, path):
            yield path
    if select(config, f"{FILTER}.enable") and select(config, f"{FILTER}.metric") in (ANY_REWARD, ACCURACY_BETWEEN):
        yield f"{FILTER}.metric"
    if reward_module(config) is not None:
        yield f"{FUNCTION}.path"
    for name in sections_in_use(config.algorithm):
        yield f"algorithm.{name}"


def uses_verl_ext(config: Any) -> bool:
    """Return whether a run uses verl_ext: see `entries_in_use`. It needs the section `algorithm`."""
    return has_algorithm(config) and any(entries_in_use(config))


def sections_in_use(algorithm: Any) -> Iterator[str]:
    """Yield the names of verl_ext's sections below `algorithm` that are readable and differ from their defaults."""
    present = {*algorithm}  # OmegaConf is slow at looking up a missing entry
    for name, kind in sections().items():
        if name not in present or registered_by_other_package(name):
            continue
        with suppress(ConfigurationError), explaining_errors(name, ConfigurationError):
            section = _read_section(algorithm.get(name), name, kind)
            if section != default_section(kind):
                yield name


def _read_section(entry: Any, name: str, kind: type[Any]) -> Any:
    """Return a section of `algorithm` as its dataclass."""
    entries = entries_set({name: resolved(entry)})
    return parse_dataclass(kind, entries.get(name), f"algorithm.{name}")


def reward_module(config: Any) -> str | None:
    """Return the name of the reward module of verl_ext that a configuration selects, or None."""
    path = str(select(config, f"{FUNCTION}.path"))
    package, _, name = path.removeprefix("pkg://").replace("/", ".").rpartition(".")
    return name if package == rewards.__name__ else None


def uses_default_trainer(config: Any) -> bool:
    """Return whether a run uses verl's default trainer. verl tests the truth value of `trainer.use_v1`, as here."""
    return bool(select(config, "trainer.use_v1"))


def read_settings(config: Any) -> Settings:
    """Read the settings from a complete configuration of verl."""
    loss = select(config, f"{ACTOR}.loss_agg_mode")
    return Settings.parse(_entries_of(config), loss_agg_mode=str(loss or Settings.loss_agg_mode))


def require_same_settings(config: Any, name: str, settings: Settings, *, computes: bool) -> None:
    """Raise if the estimator or an entry of `algorithm` has changed since the start of the run.

    Without `computes` the run uses an estimator of verl, which reads verl's settings again in every step. In that case
    only the settings of verl_ext are compared.
    """
    names = entries_read() if computes else (*COMMON, *VERL_NAMES.values())
    entries_at_start = settings.given
    entries_now = entries_set(_entries_of(config))
    differences = list(_differences(name, estimator_name(config), ESTIMATOR))
    for entry in names:
        if not registered_by_other_package(entry):
            differences += _differences(entries_at_start.get(entry), entries_now.get(entry), f"algorithm.{entry}")
    if differences:
        raise ConfigurationError(
            f"{', and '.join(differences)}. A run reads the settings of the advantages, such as the weights of the "
            "rewards, only at its start. Set these settings before the start. To change them, start a new run."
        )


def _differences(before: Any, now: Any, path: str) -> Iterator[str]:
    """Describe the entries below a path that differ, with both values. None stands for an entry that is not set."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in {**before, **now}:
            yield from _differences(before.get(name), now.get(name), f"{path}.{name}")
    elif before != now:
        yield f"{path} was {before!r} at the start and is {now!r}"


def _entries_of(config: Any) -> dict[str, Any]:
    """Read verl_ext's entries of `algorithm` as plain data."""
    algorithm = {}
    present = {*config.algorithm}  # OmegaConf is slow at looking up a missing entry
    for name in entries_read():
        if name in present and not registered_by_other_package(name):  # otherwise another package reads the section
            with explaining_errors(f"algorithm.{name}", ConfigurationError):
                algorithm[name] = resolved(config.algorithm.get(name))
    return algorithm


def resolved(value: Any) -> Any:
    """Return a section of OmegaConf as plain data, and any other value as it is."""
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


def select(config: Any, path: str) -> Any:
    """Return an entry of a configuration, or None if it is missing or only the trainer's process can resolve it."""
    with explaining_errors(path, ConfigurationError):
        return OmegaConf.select(config, path, throw_on_resolution_failure=False)


def estimator_name(config: Any) -> str:
    """Return the name in `algorithm.adv_estimator`, which may be an enum."""
    name = select(config, ESTIMATOR)
    return str(getattr(name, "value", name))


def computed_by_verl_ext(name: str) -> bool:
    """Return whether verl_ext computes the estimator of this name in this process."""
    return name in ADDED_ESTIMATORS and owner(name) is None


def owner(name: str) -> str | None:
    """Return the module that has registered an estimator with verl, or None.

    verl's own `gdpo` is ignored, because it cannot run on verl's default trainer.
    """
    function = registered().get(name)
    if function is None or (name == "gdpo" and is_verl_function(function)):
        return None
    module = getattr(function, "__module__", None)
    if module == CORE and not is_verl_function(function):  # `functools.wraps` has copied it from verl's function
        module = getattr(function, "__globals__", {}).get("__name__")
    return module or "another package"


def registered_by_other_package(name: str) -> bool:
    """Return whether another package than verl has registered an estimator of this name with verl."""
    functions = registered()
    return name in functions and not is_verl_function(functions[name])


def is_verl_function(function: Any) -> bool:
    """Return whether the code of a registered function is in verl's file.

    Its `__module__` may be wrong, because `functools.wraps` copies the module of the wrapped function.
    """
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == importlib.import_module(CORE).__file__


def registered() -> Mapping[str, Any]:
    """Return verl's estimators by name; empty if this verl has no registry, which the hook reports as an error."""
    return getattr(importlib.import_module(CORE), "ADV_ESTIMATOR_REGISTRY", {})
