"""Presets: `+verl_ext=gdpo` adds `verl_ext/gdpo.yaml` to verl's configuration.

They are in Hydra's ConfigStore in every process that imports verl with its plugins; elsewhere
`hydra.searchpath=[pkg://verl_ext.conf]` finds the files.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

GROUP = "verl_ext"
"""Hydra's group of the presets, which is also the name of their folder."""
FILES = Path(__file__).parent / GROUP
"""The folder of the presets of this package."""
MARKER = "verl_ext_presets"
"""The top-level entry to which the preset of an estimator adds its name.

Hydra's `runtime.choices` lacks presets in a list (`[cpu,gdpo]`).
"""

logger = logging.getLogger("verl_ext")


def install(config_store: ModuleType) -> None:
    """Put the presets into Hydra's ConfigStore: the files, and those of other packages' estimators."""
    from verl_ext.registry import BUILT_IN, ESTIMATORS, declaration

    store = config_store.ConfigStore.instance()
    for path in sorted(FILES.glob("*.yaml")):
        _store(store, path.stem, read(path.stem))
    for name in ESTIMATORS:
        if name not in BUILT_IN:
            try:
                _store(store, name, generated(name, declaration(name).section))
            except Exception as error:  # noqa: BLE001 - another package must not break the import of Hydra
                logger.warning("the estimator %r has no preset here: %s: %s", name, type(error).__name__, error)


def _store(store: Any, name: str, body: dict[str, Any]) -> None:
    store.store(group=GROUP, name=name, package="_global_", node=body, provider=GROUP)


def read(name: str) -> dict[str, Any]:
    """Read a preset of this package."""
    import yaml

    # Every process that imports hydra does this; the loader written in Python takes ten times as long.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = (FILES / f"{name}.yaml").read_text(encoding="utf-8")
    body: dict[str, Any] = yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader
    return body


def generated(name: str, section: type[Any] | None) -> dict[str, Any]:
    """The preset of an estimator of another package, from the dataclass of its settings."""
    from verl_ext.settings import COMMON

    kinds = {**COMMON, **({} if section is None else {name: section})}
    return {"algorithm": {"adv_estimator": name, **{at: defaults(kinds[at]) for at in kinds}}, MARKER: {name: True}}


def defaults(section: type[Any]) -> dict[str, Any]:
    """The settings of a section with their defaults."""
    return {item.name: getattr(section(), item.name) for item in dataclasses.fields(section)}
