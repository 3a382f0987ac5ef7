"""Presets: `+verl_ext=gdpo` adds the settings of gdpo to verl's configuration, each with its default.

They are in Hydra's ConfigStore in every process that imports verl with its plugins. The preset of an estimator is made
from the dataclasses of its settings and from the `preset` of its `Method`. The preset `cpu` is a file.
"""

import dataclasses
import logging
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

PRESETS = "verl_ext"
"""Hydra's group of the presets, which is also the name of their folder."""
FILES = Path(__file__).parent / PRESETS
"""The folder of the presets that are files."""
PRESET_NAMES = "verl_ext_presets"
"""The top-level entry to which the preset of an estimator adds its name.

Hydra's `runtime.choices` lacks presets in a list (`[cpu,gdpo]`).
"""

logger = logging.getLogger("verl_ext")


def store_presets(config_store: ModuleType) -> None:
    """Store the presets in Hydra's ConfigStore."""
    from verl_ext.registry import ADDED_ESTIMATORS

    store = partial(config_store.ConfigStore.instance().store, group=PRESETS, package="_global_", provider=PRESETS)
    for path in FILES.glob("*.yaml"):
        store(name=path.stem, node=read_yaml(path))
    for name in ADDED_ESTIMATORS:
        try:
            store(name=name, node=preset(name))
        except Exception as error:  # noqa: BLE001 - another package must not break the import of Hydra
            logger.warning(
                "The preset %r is not available, because its estimator cannot be loaded (%s: %s). Install the package "
                "of the estimator again, or uninstall the package.",
                name,
                type(error).__name__,
                error,
            )


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a file."""
    import yaml

    # Every process that imports hydra does this; the loader written in Python takes ten times as long.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    body: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506 - a safe loader
    return body


def preset(name: str) -> dict[str, Any]:
    """Return the preset of an estimator: its settings, those of the methods on which it can build, and its `preset`."""
    from verl_ext.registry import default_section, load, possible_bases, sections
    from verl_ext.settings import COMMON

    method = load(name)
    others = {*COMMON}
    if method.base_setting is not None:
        others.update(possible_bases())
    algorithm: dict[str, Any] = {"adv_estimator": name}
    for section, kind in sections().items():
        # A section that must be set cannot be listed with defaults, except for the section of the estimator itself.
        if section == name or (section in others and default_section(kind) is not None):
            algorithm[section] = _default_values(kind)
    return {"algorithm": algorithm, PRESET_NAMES: {name: True}, **method.preset}


def _default_values(kind: type[Any]) -> dict[str, Any]:
    """Return the default of each setting, and None for a setting that must be set."""
    values = {item.name: item.default for item in dataclasses.fields(kind)}
    return {name: None if value is dataclasses.MISSING else value for name, value in values.items()}
