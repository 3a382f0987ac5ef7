"""Hydra presets: what each estimator needs, settable without `+`, typed and refused when misspelt.

As the primary configuration (`--config-name gdpo`), or on top of one's own (`+verl_ext=gdpo`). The values are the
defaults of the sections, plus what the paper asks for elsewhere in verl's configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from verl_ext.registry import ESTIMATORS, declaration
from verl_ext.settings import sections

GROUP = "verl_ext"
MARKER = "verl_ext_presets"
"""Top-level entry in which every preset leaves its name, so that the checks know which ones were composed.

Hydra's `runtime.choices` does not have those in lists (`[cpu,gdpo]`) or primary configurations.
"""


def install(config_store: ModuleType) -> None:
    """Store the presets where `hydra.main` looks for configurations."""
    _store(config_store, {name: preset(name) for name in ESTIMATORS})


@contextmanager
def without_values(config_store: ModuleType) -> Iterator[None]:
    """Presets that declare the same keys but set none of them: Hydra never merges `???` over a value."""
    _store(config_store, {name: _missing(preset(name)) for name in ESTIMATORS})
    try:
        yield
    finally:
        install(config_store)


def _store(config_store: ModuleType, bodies: Mapping[str, Mapping[str, Any]]) -> None:
    store = config_store.ConfigStore.instance()
    for name, body in bodies.items():
        store.store(name=name, node={"defaults": ["ppo_trainer", "_self_"], **body}, provider=GROUP)
        store.store(group=GROUP, name=name, package="_global_", node=body, provider=GROUP)


def _missing(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _missing(value) if isinstance(value, Mapping) else "???" for name, value in body.items()}


def preset(name: str) -> dict[str, Any]:
    """The preset of one estimator as plain data."""
    declared = declaration(name)
    own = ("rewards", name, *declared.also(), "verl_ext")
    known = sections()
    return {
        "algorithm": {"adv_estimator": name, **{part: defaults(known[part]) for part in own if part in known}},
        **declared.preset,
        MARKER: {name: True},
    }


def defaults(section: type[Any]) -> dict[str, Any]:
    """A section's settings with their defaults, as plain data."""
    return {item.name: item.default for item in dataclasses.fields(section)}
