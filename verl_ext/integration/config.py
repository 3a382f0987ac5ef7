"""From verl's configuration objects to `Settings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_ext.errors import ConfigurationError
from verl_ext.settings import SECTIONS, Settings

_READ = (
    *SECTIONS,
    "gdpo_reward_keys",
    "gdpo_reward_weights",
    "norm_adv_by_std_in_grpo",
    "use_kl_in_reward",
)
_LOSS = ("actor_rollout_ref", "actor", "loss_agg_mode")


def read_settings(algorithm: Any, *, loss_agg_mode: str | None = None) -> Settings:
    """Settings of an `algorithm` section: a DictConfig, verl's `AlgoConfig`, a plain mapping, or None for defaults.

    The actor's loss is looked up in the whole configuration where the section is part of one.
    """
    return Settings.parse(plain(algorithm), loss_agg_mode=loss_agg_mode or loss_of(algorithm))


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
    return _resolved(found)


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
        return _resolved({name: value for name in _READ if (value := config.get(name)) is not None})


def _resolved(found: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {
            name: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            for name, value in found.items()
        }
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"algorithm cannot be read: {error}") from error


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
        return "token-mean"
    root = algorithm._get_root()
    try:
        node = root
        for name in _LOSS:
            node = node._content[name]
        found = _raw(node)
    except (_Unresolved, AttributeError, KeyError, TypeError):
        found = OmegaConf.select(root, ".".join(_LOSS))
    return found or "token-mean"
