"""The configuration of a run, read from verl's objects. The subpackages and the rules share it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from verl_ext import rewards
from verl_ext.conf import PRESET_NAMES
from verl_ext.core.chain import Chain
from verl_ext.errors import ConfigurationError, reading
from verl_ext.names import is_anothers, is_ours
from verl_ext.registry import default_section, entries_read, method_and_base, sections
from verl_ext.settings import ACCURACY_BETWEEN, ANY_REWARD, COMMON, VERL_NAMES, Settings, entries_set

ACTOR = "actor_rollout_ref.actor"
FILTER = "algorithm.filter_groups"
FUNCTION = "reward.custom_reward_function"


@dataclass(frozen=True)
class RunConfig:
    """The configuration of one run, as the rules need it."""

    name: str
    """The estimator."""
    settings: Settings
    """The settings in force, or the defaults if they cannot be read."""
    chain: Chain | None
    """The steps of the estimator, or None if it is not an estimator of verl_ext or cannot be built."""
    config: Any
    """verl's whole configuration."""

    @classmethod
    def of(cls, config: Any) -> RunConfig | None:
        """Return the configuration of a run with unread settings, or None without a section `algorithm`.

        Estimators of verl_ext do not compute for a configuration without that section.
        """
        if not (OmegaConf.is_dict(config) and OmegaConf.is_dict(config.get("algorithm"))):
            return None
        return cls(estimator_name(config), Settings(), None, config)

    @property
    def filter(self) -> str | None:
        """The metric by which verl filters groups, or None if verl does not filter."""
        return self.select(f"{FILTER}.metric") if self.select(f"{FILTER}.enable") else None

    @property
    def computes(self) -> bool:
        """Whether verl_ext computes the advantages."""
        return is_ours(self.name)

    @property
    def ours(self) -> bool:
        """Whether the run uses verl_ext."""
        return self.computes or self.asked

    @property
    def asked(self) -> bool:
        """Whether the configuration selects a preset, group filter, reward function or setting of verl_ext."""
        named = any(self.select(path) for path in (PRESET_NAMES, "algorithm.verl_ext"))
        chosen = self.filter in (ANY_REWARD, ACCURACY_BETWEEN) or own_scorer(self.config) is not None
        return named or chosen or any(set_in(self.config.algorithm))

    @property
    def only_validates(self) -> bool:
        """Whether the run validates once without training. verl reads `val_only` only if `val_before_train` is set."""
        return bool(self.select("trainer.val_only") and self.select("trainer.val_before_train"))

    @property
    def used(self) -> tuple[str, ...]:
        """The estimators whose settings and rules apply."""
        return method_and_base(self.name, self.settings) if self.computes else ()

    def select(self, path: str) -> Any:
        """Return an entry of the configuration, or None."""
        return select(self.config, path)


def set_in(config: Any) -> Iterator[str]:
    """Yield the names of verl_ext's sections in a configuration that are readable and differ from their defaults."""
    for name, kind in sections().items():
        with suppress(ConfigurationError), reading(name, ConfigurationError):
            if Settings.parse({name: resolved(config.get(name))}).of(name, kind) != default_section(kind):
                yield name


def own_scorer(config: Any) -> str | None:
    """Return the name of the reward module of verl_ext that a configuration selects, or None."""
    path = str(select(config, f"{FUNCTION}.path"))
    package, _, name = path.removeprefix("pkg://").replace("/", ".").rpartition(".")
    return name if package == rewards.__name__ else None


def read_settings(config: Any) -> Settings:
    """Read the settings from a complete configuration of verl."""
    loss = select(config, f"{ACTOR}.loss_agg_mode")
    return Settings.parse(_entries_of(config), loss_agg_mode=str(loss or Settings.loss_agg_mode))


def require_unchanged(config: Any, name: str, settings: Settings, *, computes: bool) -> None:
    """Raise if the estimator or an entry of `algorithm` has changed since the start of the run.

    Without `computes` the run uses an estimator of verl, which reads verl's settings again in every step. In that case
    only the settings of verl_ext are compared.
    """
    compared = entries_read() if computes else (*COMMON, *VERL_NAMES.values())
    now, before = entries_set(_entries_of(config)), settings.given
    found = [*_differences(name, estimator_name(config), "algorithm.adv_estimator")]
    for entry in compared:
        if not is_anothers(entry):
            found += _differences(before.get(entry), now.get(entry), f"algorithm.{entry}")
    if found:
        raise ConfigurationError(
            f"{', and '.join(found)}. A run reads the settings of the advantages, such as the weights of the rewards, "
            "only at its start. Set these settings before the start. To change them, start a new run."
        )


def _differences(before: Any, now: Any, path: str) -> Iterator[str]:
    """Describe the entries below a path that differ, with both values. None stands for an entry that is not set."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in {**before, **now}:
            yield from _differences(before.get(name), now.get(name), f"{path}.{name}")
    elif before != now and repr(before) != repr(now):  # NaN does not equal itself
        yield f"{path} was {before!r} at the start and is {now!r}"


def _entries_of(config: Any) -> dict[str, Any]:
    """Read verl_ext's entries of `algorithm` as plain data."""
    algorithm = {}
    present = {*config.algorithm}  # OmegaConf is slow at looking up a missing entry
    for name in entries_read():
        if name in present and not is_anothers(name):  # otherwise another package reads the section
            with reading(f"algorithm.{name}", ConfigurationError):
                algorithm[name] = resolved(config.algorithm.get(name))
    return algorithm


def resolved(value: Any) -> Any:
    """Return a section of OmegaConf as plain data, and any other value as it is."""
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


def select(config: Any, path: str) -> Any:
    """Return an entry of a configuration, or None if it is missing or only the trainer's process can resolve it."""
    with reading(path, ConfigurationError):
        return OmegaConf.select(config, path, throw_on_resolution_failure=False)


def estimator_name(config: Any) -> str:
    """Return the name in `algorithm.adv_estimator`, which may be an enum."""
    name = select(config, "algorithm.adv_estimator")
    return str(getattr(name, "value", name))
