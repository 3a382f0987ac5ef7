"""Hydra presets: what each estimator needs, settable without `+`, typed and refused when misspelt.

As the primary configuration (`--config-name gdpo`), or on top of one's own (`+verl_ext=gdpo`). The values are the
defaults of the sections, plus what the paper asks for elsewhere in verl's configuration.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from verl_ext.registry import ESTIMATORS, declaration
from verl_ext.settings import sections

GROUP = "verl_ext"


def install(config_store: ModuleType) -> None:
    """Store the presets where `hydra.main` looks for configurations."""
    store = config_store.ConfigStore.instance()
    for name in ESTIMATORS:
        body = preset(name)
        store.store(name=name, node={"defaults": ["ppo_trainer", "_self_"], **body}, provider=GROUP)
        store.store(group=GROUP, name=name, package="_global_", node=body, provider=GROUP)


def preset(name: str) -> dict[str, Any]:
    """The preset of one estimator as plain data."""
    declared = declaration(name)
    own = ("rewards", name, *declared.also(), "verl_ext")
    known = sections()
    return {
        "algorithm": {"adv_estimator": name, **{part: defaults(known[part]) for part in own if part in known}},
        **declared.preset,
    }


def defaults(section: type[Any]) -> dict[str, Any]:
    """A section's settings with their defaults, as plain data."""
    return {item.name: item.default for item in dataclasses.fields(section)}
