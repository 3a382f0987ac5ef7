"""Settings that verl accepts and does not read, as tables. This file and `managers` need nothing else of verl_ext.

The functions take the settings that the user has written, by path, because a default of verl is no mistake. The paths
below repeat some of `run_config`, which a contract in pyproject.toml keeps this file from importing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from verl_ext.checks.managers import MANAGER_ARGUMENTS, manager_of_verl

ACTOR = "actor_rollout_ref.actor"
FILTER = "algorithm.filter_groups"
FUNCTION = "reward.custom_reward_function"
CORRECTION = "algorithm.rollout_correction"
KL_IN_LOSS = f"{ACTOR}.use_kl_loss"
KL_IN_REWARD = "algorithm.use_kl_in_reward"


class Switch(NamedTuple):
    """A setting without which verl does not read some other settings."""

    beginning: str
    """The beginning of the paths of the other settings."""
    path: str
    default: object
    """The value of the switch with which verl does not read the other settings."""
    line: str
    """What to write so that verl reads them. `{value}` stands for the value of the other setting."""


SWITCHES = (
    Switch(f"{ACTOR}.kl_loss_", KL_IN_LOSS, False, f"{KL_IN_LOSS}=True"),
    Switch("algorithm.kl_", KL_IN_REWARD, False, f"{KL_IN_REWARD}=True"),
    Switch(f"{FILTER}.", f"{FILTER}.enable", False, f"{FILTER}.enable=True"),
    Switch(f"{CORRECTION}.rollout_is_", f"{CORRECTION}.rollout_is", None, f"{CORRECTION}.rollout_is=token"),
    Switch(f"{FUNCTION}.", f"{FUNCTION}.path", None, f"{FUNCTION}.path=FILE"),
    Switch("reward.reward_model.model_path.", "reward.reward_model.enable", False, "reward.reward_model.enable=True"),
    Switch(
        f"{ACTOR}.clip_ratio.",
        f"{ACTOR}.clip_ratio_low",
        0.2,
        f"{ACTOR}.clip_ratio_low={{value}} {ACTOR}.clip_ratio_high={{value}}",
    ),
)
OLD_SECTIONS = ("reward_model", "custom_reward_function", "sandbox_fusion")
"""The sections that older versions of verl had at the top level: `main_ppo` composes them, but does not read them."""


class OldSetting(NamedTuple):
    """A setting in one of `OLD_SECTIONS`."""

    path: str
    value: str
    """The value as it is written on the command line."""
    line: str | None
    """The line that has the effect today, or None if no setting of verl has it any more."""


def behind_switches(written: Mapping[str, Any], select: Callable[[str], Any]) -> Iterator[tuple[str, Any, Switch]]:
    """Yield path and value of each written setting that needs a switch, with the switch, which is off.

    `select` returns an entry of the composed configuration.
    """
    for switch in SWITCHES:
        # A switch that is explicitly off is a habit, as in `use_kl_loss=False kl_loss_coef=0.001`.
        if switch.path in written or select(switch.path) != switch.default:
            continue
        for path, value in written.items():
            needs_switch = f"{path}.".startswith(switch.beginning)
            if needs_switch and value not in (None, 0, switch.default):
                yield path, value, switch


def arguments_not_read(written: Iterable[str], select: Callable[[str], Any]) -> list[str]:
    """Return the paths of written entries of `reward.reward_kwargs` that verl's reward manager does not read."""
    manager = manager_of_verl(select)
    if manager is None:
        return []
    read = [f"{MANAGER_ARGUMENTS}.{argument}" for argument in manager.arguments]
    return [path for path in written if path.startswith(f"{MANAGER_ARGUMENTS}.") and path not in read]


def old_settings(config: Any) -> Iterator[OldSetting]:
    """Yield each setting of `OLD_SECTIONS` whose effect the configuration does not have in another place."""
    sections = OmegaConf.to_container(OmegaConf.create({name: config.get(name) for name in OLD_SECTIONS}))
    written = {path: value for path, value in leaves(sections) if value is not None}
    if not written or "async_training" in config:  # the asynchronous program of verl migrates the sections
        return
    new_paths, known = _migrated(config, written)
    for path, raw_value in written.items():
        resolved = OmegaConf.select(config, path, throw_on_resolution_failure=False)
        value = raw_value if resolved is None else _plain(resolved)
        is_plain_word = isinstance(value, str) and re.fullmatch(r"[\w./:-]+", value)
        text = value if is_plain_word else json.dumps(value, ensure_ascii=False)  # as Hydra reads it
        new_path = new_paths.get(path)
        if new_path is None:
            yield OldSetting(path, text, None)
        elif _plain(OmegaConf.select(config, new_path, throw_on_resolution_failure=False)) != value:
            plus = "" if new_path in known else "+"
            yield OldSetting(path, text, f"{plus}{new_path}={text}")


def _migrated(config: Any, paths: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """Return the new path of each old path, and all paths of the section `reward`.

    verl's own migration is called with each path as the value of its setting, so that the values show the new paths.
    """
    import verl
    from verl.experimental.reward_loop import migrate_legacy_reward_impl

    probe = OmegaConf.load(Path(verl.__file__).with_name("trainer") / "config/legacy_reward_impl.yaml")
    probe.reward = OmegaConf.to_container(config.get("reward") or OmegaConf.create())
    known = {path for path, _ in leaves(OmegaConf.to_container(probe.reward), "reward")}
    for path in paths:
        OmegaConf.update(probe, path, path, force_add=True)
    migrated = OmegaConf.to_container(migrate_legacy_reward_impl(probe).reward)
    new_paths = {str(value): path for path, value in leaves(migrated, "reward")}
    return new_paths, known


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of each setting below a path, with its value."""
    if not isinstance(value, dict):
        yield path, value
        return
    for name, inner in value.items():
        yield from leaves(inner, f"{path}.{name}".strip("."))
