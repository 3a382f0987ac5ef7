"""Read the settings on the command lines of `show` and `compare`."""

from collections.abc import Iterable, Mapping
from typing import Any

from verl_ext.errors import ConfigurationError, unknown
from verl_ext.registry import changed_sections, entries_read
from verl_ext.settings import VERL_NAMES, Settings

LOSS = "actor_rollout_ref.actor.loss_agg_mode"


def parse_settings(
    overrides: Iterable[str], algorithm: Mapping[str, Any] | None = None, loss_agg_mode: str = "token-mean"
) -> Settings:
    """Read `KEY=VALUE` arguments as on verl's command line; they override the section `algorithm` of a run.

    >>> parse_settings(["algorithm.rewards.keys=[a,b]"], {"rewards": {"keys": ["c"], "weights": [1, 2]}}).rewards.keys
    ('a', 'b')
    """
    from omegaconf import OmegaConf

    value_of_key = dict(map(_parse_override, overrides))
    if LOSS in value_of_key:
        loss_agg_mode = value_of_key.pop(LOSS)
    section: dict[str, Any] = {name: value for name, value in (algorithm or {}).items() if name != "verl_ext"}
    if "algorithm.rewards.keys" in value_of_key:
        section = _without_weights(section)  # they belong to the keys of the run
    config: Any = OmegaConf.create({"algorithm": section})
    for key, value in value_of_key.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    overridden: Any = OmegaConf.to_container(config.algorithm)
    settings = Settings.parse(overridden, loss_agg_mode=loss_agg_mode)
    changed_sections(settings)  # raises if the section of an estimator is wrong
    return settings


def _without_weights(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `algorithm` without the weights of its keys, and without verl's settings for both."""
    no_verl_names = dict.fromkeys(VERL_NAMES.values())
    rewards = {**(section.get("rewards") or {}), "weights": None}
    return {**section, **no_verl_names, "rewards": rewards}


def _parse_override(text: str) -> tuple[str, Any]:
    """Return the key and the value of one setting; raise if no estimator reads the setting."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    invalid = ConfigurationError(
        f"{text!r} is not a valid setting KEY=VALUE. Write a list as 'algorithm.rewards.keys=[a,b]' and a mapping "
        "as 'algorithm.rewards.conditions={a:{reward:b,at_least:1}}'."
    )
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise invalid from error
    if override.is_sweep_override():  # several values, as in `KEY=a,b`
        raise invalid
    key = override.key_or_group
    valid = [f"algorithm.{name}" for name in entries_read() if name != "verl_ext"]
    valid.append(LOSS)
    entry_of_algorithm = ".".join(key.split(".")[:2])
    if entry_of_algorithm not in valid and key != LOSS:
        raise ConfigurationError(
            f"{text!r}: {unknown('setting', key, valid)}. Write the name of an estimator without `=`."
        )
    return key, None if override.is_delete() else override.value()
