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

    plain: dict[str, Any] = {name: value for name, value in (algorithm or {}).items() if name != "verl_ext"}
    given = dict(map(_override, overrides))
    mode = given.pop(LOSS, loss_agg_mode)
    if "algorithm.rewards.keys" in given:  # the run's weights belong to the run's keys
        plain |= dict.fromkeys(VERL_NAMES.values())
        plain["rewards"] = {**(plain.get("rewards") or {}), "weights": None}
    config: Any = OmegaConf.create({"algorithm": plain})
    for key, value in given.items():
        OmegaConf.update(config, key, value, merge=False, force_add=True)
    section: Any = OmegaConf.to_container(config.algorithm)
    settings = Settings.parse(section, loss_agg_mode=mode)
    changed_sections(settings)
    return settings


def _override(text: str) -> tuple[str, Any]:
    """Return the key and the value of one setting; raise if no estimator reads the setting."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigurationError(
            f"{text!r} is not a valid setting KEY=VALUE. Write a list as 'algorithm.rewards.keys=[a,b]' and a mapping "
            "as 'algorithm.rewards.conditions={a:{reward:b,at_least:1}}'."
        ) from error
    key = override.key_or_group
    valid = [*(f"algorithm.{name}" for name in entries_read() if name != "verl_ext"), LOSS]
    if ".".join(key.split(".")[:2]) not in valid and key != LOSS:
        raise ConfigurationError(
            f"{text!r}: {unknown('setting', key, valid)}. Write the name of an estimator without `=`."
        )
    return key, override.value()
