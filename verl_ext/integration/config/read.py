"""From verl's configuration objects to `Settings`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.errors import ConfigurationError, nearest
from verl_ext.settings import SECTIONS, VERL_NAMES, Settings

_READ = (
    *SECTIONS,
    "gdpo_reward_keys",
    "gdpo_reward_weights",
    "norm_adv_by_std_in_grpo",
    "use_kl_in_reward",
)
_LOSS = ("actor_rollout_ref", "actor", "loss_agg_mode")
_DEFAULT_LOSS = "token-mean"


def read_settings(algorithm: Any, *, loss_agg_mode: str | None = None) -> Settings:
    """Settings of an `algorithm` section: a DictConfig, verl's `AlgoConfig`, a plain mapping, or None for defaults.

    The actor's loss is looked up in the whole configuration where the section is part of one.
    """
    return Settings.parse(plain(algorithm), loss_agg_mode=loss_agg_mode or loss_of(algorithm))


def unreadable(algorithm: DictConfig) -> Iterator[str]:
    """What is wrong with each part of an `algorithm` section that `read_settings` would refuse, not the first alone."""
    parts = [
        ("rewards", *VERL_NAMES.values()),
        *((name,) for name in _READ if name not in ("rewards", *VERL_NAMES.values())),
    ]
    for names in parts:
        try:
            Settings.parse({name: _entry(algorithm, name) for name in names})
        except ConfigurationError as error:
            yield str(error)
    try:
        loss_of(algorithm)
    except ConfigurationError as error:
        yield str(error)


def plain(algorithm: Any) -> dict[str, Any]:
    """The entries we read, as plain data, of those that are there."""
    if algorithm is None:
        return {}
    if isinstance(algorithm, DictConfig):
        return _plain_config(algorithm)
    # verl's AlgoConfig is a Mapping too, of which `in` raises: its fields are attributes.
    if isinstance(algorithm, Mapping) and not is_dataclass(algorithm):
        found = {name: algorithm[name] for name in _READ if name in algorithm}
    else:
        found = {name: value for name in _READ if (value := getattr(algorithm, name, None)) is not None}
    return {name: _resolved(f"algorithm.{name}", value) for name, value in found.items()}


@contextmanager
def readable(path: str) -> Iterator[None]:
    """Name the entry that OmegaConf cannot make a value of."""
    try:
        yield
    except (OmegaConfBaseException, RecursionError) as error:
        said = str(error).partition("\n")[0]
        raise ConfigurationError(f"{path} cannot be read: {type(error).__name__}: {said}") from error


def select(config: Any, path: str) -> Any:
    """An entry of a configuration, None where there is none."""
    with readable(path):
        return OmegaConf.select(config, path)


def estimator_name(config: Any) -> str:
    """The name in `algorithm.adv_estimator`, which may be an enum."""
    with readable("algorithm.adv_estimator"):
        found = config.algorithm.adv_estimator
    return str(getattr(found, "value", found))


def has(config: Any, path: str) -> bool:
    """Whether a configuration has an entry, be it null."""
    parent, _, name = path.rpartition(".")
    section = select(config, parent)
    return OmegaConf.is_dict(section) and name in section


def misspelt(algorithm: Iterable[Any], *, known: Collection[str] = ()) -> Iterator[str]:
    """Entries of `algorithm` that look like one of ours and are none; `known` are those that verl has."""
    ours = {name: f"algorithm.{name}" for name in (*SECTIONS, *VERL_NAMES.values())}
    fields = {item.name: f"algorithm.{name}.{item.name}" for name, kind in SECTIONS.items() for item in fields_of(kind)}
    for key in map(str, algorithm):
        near = None if key in ours or key in known else nearest(key, fields | ours, cutoff=0.75)
        if near is not None:
            yield f"algorithm.{key} is unknown and would be ignored: did you mean {(fields | ours)[near]}?"


class _Unresolved(Exception):  # noqa: N818 - a signal, not an error
    """A node which is more than plain data."""


def _plain_config(config: DictConfig) -> dict[str, Any]:
    """Plain data of a DictConfig.

    OmegaConf takes 150 microseconds for it, as long as the statistics of a thousand rows, and the estimator is called
    with a configuration every time. Where nothing has to be resolved, its nodes' contents are the data already.
    """
    try:
        content = config._content
        return {name: _raw(content[name]) for name in _READ if name in content}
    except (_Unresolved, AttributeError, TypeError):
        return {name: value for name in _READ if (value := _entry(config, name)) is not None}


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


def _raw(node: Any) -> Any:
    inside = vars(node)
    value = inside["_content"] if "_content" in inside else inside.get("_val", _Unresolved)
    if isinstance(value, dict):
        return {key: _raw(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_raw(child) for child in value]
    if value is _Unresolved or (isinstance(value, str) and ("${" in value or value == "???")):
        raise _Unresolved
    return value


def loss_of(algorithm: Any) -> str:
    """The actor's `loss_agg_mode` in the configuration that `algorithm` is a section of; verl's default without one."""
    if not isinstance(algorithm, DictConfig):
        return _DEFAULT_LOSS
    root = algorithm._get_root()
    try:
        node = root
        for name in _LOSS:
            node = node._content[name]
        found = _raw(node)
    except (_Unresolved, AttributeError, KeyError, TypeError):
        found = select(root, ".".join(_LOSS))
    if not isinstance(found, str | None):
        raise ConfigurationError(f"{'.'.join(_LOSS)} must name a mean, {_DEFAULT_LOSS} for one, found {found!r}")
    return found or _DEFAULT_LOSS


def accuracy_settings(name: str, settings: Settings) -> tuple[str | None, float | None]:
    """The `accuracy_key` and `accuracy_threshold` of an estimator's own section, where it has one."""
    own = getattr(settings, name, None)
    return getattr(own, "accuracy_key", None), getattr(own, "accuracy_threshold", None)
