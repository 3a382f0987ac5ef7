"""Read `Settings` from verl's configuration objects."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.errors import ConfigurationError, nearest
from verl_ext.registry import ESTIMATORS
from verl_ext.settings import COMMON, VERL_NAMES, Settings, sections

OF_VERL = (*VERL_NAMES.values(), "norm_adv_by_std_in_grpo", "use_kl_in_reward")
"""verl's own entries of `algorithm` that this package reads."""
_LOSS = "actor_rollout_ref.actor.loss_agg_mode"
_DEFAULT_LOSS = "token-mean"


def read_settings(algorithm: Any) -> Settings:
    """Settings of an `algorithm` section: a DictConfig, verl's `AlgoConfig`, a mapping, or None for the defaults.

    The actor's loss comes from the whole configuration if the section is part of one.
    """
    return Settings.parse(plain(algorithm), loss_agg_mode=loss_of(algorithm))


def settings_in_force(config: Any) -> Settings:
    """The settings of a checked run. With an estimator of verl's own, these are the sections for all estimators.

    If an entry there is wrong, they are the defaults, and the check has logged a warning.
    """
    if estimator_name(config) in ESTIMATORS:
        return read_settings(config.algorithm)
    return common_settings(config) or Settings()


def common_settings(config: Any) -> Settings | None:
    """The sections for all estimators, or None if an entry there is wrong."""
    names = (*COMMON, *VERL_NAMES.values())
    try:
        return Settings.parse({name: value for name in names if (value := _entry(config.algorithm, name)) is not None})
    except ConfigurationError:
        return None


def entries() -> tuple[str, ...]:
    """The entries of `algorithm` that this package reads."""
    return (*COMMON, *ESTIMATORS, *OF_VERL)


def unreadable(algorithm: DictConfig) -> Iterator[str]:
    """One message for each part of an `algorithm` section that `read_settings` cannot read, not only the first."""
    rewards = ("rewards", *VERL_NAMES.values())
    for names in (rewards, *((name,) for name in entries() if name not in rewards)):
        try:
            Settings.parse({name: _entry(algorithm, name) for name in names})
        except ConfigurationError as error:
            yield str(error)
    try:
        loss_of(algorithm)
    except ConfigurationError as error:
        yield str(error)


def plain(algorithm: Any) -> dict[str, Any]:
    """Those entries that this package reads and the section has, as a dict."""
    if algorithm is None:
        return {}
    if isinstance(algorithm, DictConfig):
        return {name: value for name in entries() if (value := _entry(algorithm, name)) is not None}
    # verl's AlgoConfig is a Mapping too, but its `in` raises: its fields are attributes.
    if isinstance(algorithm, Mapping) and not is_dataclass(algorithm):
        values = {name: algorithm[name] for name in entries() if name in algorithm}
    else:
        values = {name: value for name in entries() if (value := getattr(algorithm, name, None)) is not None}
    return {name: _resolved(f"algorithm.{name}", value) for name, value in values.items()}


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn an error of OmegaConf into one that names the entry."""
    try:
        yield
    except (OmegaConfBaseException, RecursionError) as error:
        line = str(error).partition("\n")[0]
        raise ConfigurationError(f"{path} cannot be read: {type(error).__name__}: {line}") from error


def select(config: Any, path: str) -> Any:
    """An entry of a configuration, or None."""
    with readable(path):
        return OmegaConf.select(config, path)


def estimator_name(config: Any) -> str:
    """The name in `algorithm.adv_estimator`, which may be an enum."""
    with readable("algorithm.adv_estimator"):
        name = config.algorithm.adv_estimator
    return str(getattr(name, "value", name))


def has(config: Any, path: str) -> bool:
    """Whether a configuration has an entry, which may be null."""
    parent, _, name = path.rpartition(".")
    section = select(config, parent)
    return OmegaConf.is_dict(section) and name in section


def misspelt(algorithm: Iterable[Any], *, known: Collection[str] = ()) -> Iterator[str]:
    """Messages for entries of `algorithm` that look like a misspelt one of ours; `known` are verl's."""
    known_sections = sections()
    ours = {name: f"algorithm.{name}" for name in (*known_sections, *VERL_NAMES.values())}
    every = ((name, item.name) for name, kind in known_sections.items() for item in fields_of(kind))
    fields = {item: f"algorithm.{name}.{item}" for name, item in every}
    for key in map(str, algorithm):
        near = None if key in ours or key in known else nearest(key, fields | ours, cutoff=0.75)
        if near is not None:
            yield f"algorithm.{key} is unknown and would be ignored: did you mean {(fields | ours)[near]}?"


def _entry(config: DictConfig, name: str) -> Any:
    path = f"algorithm.{name}"
    with readable(path):
        if OmegaConf.is_missing(config, name):
            raise ConfigurationError(f"{path} is ???: give it a value, or remove it")
        return _resolved(path, config.get(name))


def _resolved(path: str, value: Any) -> Any:
    if not OmegaConf.is_config(value):
        return value
    with readable(path):
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)


def loss_of(algorithm: Any) -> str:
    """The actor's `loss_agg_mode` in the configuration around `algorithm`; verl's default if there is none."""
    if not isinstance(algorithm, DictConfig):
        return _DEFAULT_LOSS
    name = select(algorithm._get_root(), _LOSS)
    if not isinstance(name, str | None):
        raise ConfigurationError(f"{_LOSS} must be the name of a mean, such as {_DEFAULT_LOSS}, found {name!r}")
    return name or _DEFAULT_LOSS
