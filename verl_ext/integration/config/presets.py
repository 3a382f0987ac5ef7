"""Hydra presets: with one, an estimator's settings need no `+`, and a misspelt one is an error.

A preset is the primary configuration (`--config-name gdpo`) or an addition to the user's own (`+verl_ext=gdpo`). It
holds the defaults of the estimator's sections and what the paper sets elsewhere in verl's configuration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from verl_ext import conf
from verl_ext.registry import declaration, declarations, skipping
from verl_ext.settings import sections

GROUP = "verl_ext"
MARKER = "verl_ext_presets"
"""Top-level entry to which every preset adds its name, for the checks.

Hydra's `runtime.choices` lacks presets from a list (`[cpu,gdpo]`) and primary configurations.
"""


def install(config_store: ModuleType) -> None:
    """Store the presets in Hydra's ConfigStore."""
    conf.store(config_store.ConfigStore.instance())
    _store(config_store, preset)


@contextmanager
def without_values(config_store: ModuleType) -> Iterator[None]:
    """Store presets with the same keys but no values (`???`, which Hydra never merges over a value)."""
    _store(config_store, lambda name: _missing(preset(name)))
    try:
        yield
    finally:
        install(config_store)


def _store(config_store: ModuleType, body_of: Callable[[str], Mapping[str, Any]]) -> None:
    store = config_store.ConfigStore.instance()
    for name in declarations():
        with skipping(name):
            body = body_of(name)
            store.store(name=name, node={"defaults": ["ppo_trainer", "_self_"], **body}, provider=GROUP)
            store.store(group=GROUP, name=name, package="_global_", node=body, provider=GROUP)


def _missing(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _missing(value) if isinstance(value, Mapping) else "???" for name, value in body.items()}


def preset(name: str) -> dict[str, Any]:
    """The preset of one estimator, as a dict."""
    declared = declaration(name)
    own = ("rewards", name, *declared.also(), "verl_ext")
    known = sections()
    return {
        "algorithm": {"adv_estimator": name, **{part: defaults(known[part]) for part in own if part in known}},
        **declared.preset,
        MARKER: {name: True},
    }


def defaults(section: type[Any]) -> dict[str, Any]:
    """A section's settings with their defaults, as a dict."""
    return {item.name: item.default for item in dataclasses.fields(section)}
