"""Read verl's configuration objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.core.chain import Chain
from verl_ext.errors import ConfigurationError, reading
from verl_ext.registry import INSTALLED, used
from verl_ext.settings import ACCURACY_BETWEEN, ANY_REWARD, Settings, entries, sections

ACTOR = "actor_rollout_ref.actor"
FILTER = "algorithm.filter_groups"


@dataclass(frozen=True)
class RunConfig:
    """The configuration of one run, as the rules need it."""

    name: str
    """The estimator."""
    settings: Settings
    """The settings in force; the defaults if they cannot be read."""
    chain: Chain | None
    """The steps of the estimator; None if it is not ours, or cannot be built."""
    config: Any
    """verl's whole configuration."""

    @property
    def filter(self) -> str | None:
        """The metric by which verl filters groups; None if it does not."""
        return self.select(f"{FILTER}.metric") if self.select(f"{FILTER}.enable") else None

    @property
    def ours(self) -> bool:
        """Whether the run uses this package: its estimator, its filter of groups, or a section of its settings."""
        given = any(name in self.config.algorithm for name in sections())
        return given or self.name in INSTALLED or self.filter in (ANY_REWARD, ACCURACY_BETWEEN)

    @property
    def used(self) -> tuple[str, ...]:
        """The estimators whose settings and rules apply."""
        return used(self.name, self.settings) if self.name in INSTALLED else (self.name,)

    def select(self, path: str) -> Any:
        """Return an entry of the configuration, or None."""
        return select(self.config, path)


def read_settings(algorithm: Any) -> Settings:
    """Read the settings of an `algorithm` section: a DictConfig, a mapping, or None.

    The actor's loss comes from the whole configuration if the section is part of one.
    """
    loss = select(algorithm._get_root(), f"{ACTOR}.loss_agg_mode") if isinstance(algorithm, DictConfig) else None
    return Settings.parse(read_entries(algorithm), loss_agg_mode=str(loss or Settings.loss_agg_mode))


def read_entries(algorithm: Any) -> dict[str, Any]:
    """Return those entries of an `algorithm` section that this package reads, without interpolations."""
    values = {}
    for name in entries():
        with reading(f"algorithm.{name}", ConfigurationError):
            values[name] = resolved((algorithm or {}).get(name))
    return values


def resolved(value: Any) -> Any:
    """Return a section of OmegaConf as plain data, and any other value as it is."""
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


def select(config: Any, path: str) -> Any:
    """Return an entry of a configuration, or None."""
    with reading(path, ConfigurationError):
        return OmegaConf.select(config, path)


def estimator_name(config: Any) -> str:
    """Return the name in `algorithm.adv_estimator`, which may be an enum."""
    name = select(config, "algorithm.adv_estimator")
    return str(getattr(name, "value", name))
