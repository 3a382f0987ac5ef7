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

PRESET_GROUP = "verl_ext"
"""Hydra's group of the presets, which is also the name of their folder."""
PRESET_FOLDER = Path(__file__).parent / PRESET_GROUP
"""The folder of the presets that are files."""
SELECTED_PRESETS = "verl_ext_presets"
"""The top-level entry to which the preset of an estimator adds its name, as in `{gdpo: true}`.

Hydra's `runtime.choices` lacks presets in a list (`[cpu,gdpo]`).
"""

logger = logging.getLogger("verl_ext")


def store_presets(config_store: ModuleType) -> None:
    """Store the presets in Hydra's ConfigStore."""
    from verl_ext.registry import ADDED_ESTIMATORS

    store = partial(
        config_store.ConfigStore.instance().store, group=PRESET_GROUP, package="_global_", provider=PRESET_GROUP
    )
    for path in PRESET_FOLDER.glob("*.yaml"):
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
    """Return the content of a YAML file whose top level is a mapping."""
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
    other_sections = {*COMMON}
    if method.base_setting is not None:
        other_sections.update(possible_bases())
    algorithm: dict[str, Any] = {"adv_estimator": name}
    for section, kind in sections().items():
        has_defaults = default_section(kind) is not None  # otherwise one of its settings must be set
        is_optional_section = section in other_sections and has_defaults
        if section == name or is_optional_section:
            algorithm[section] = _default_values(kind)
    return {"algorithm": algorithm, SELECTED_PRESETS: {name: True}, **method.preset}


def _default_values(kind: type[Any]) -> dict[str, Any]:
    """Return the default of each setting, and None for a setting that must be set."""
    values = {item.name: item.default for item in dataclasses.fields(kind)}
    return {name: None if value is dataclasses.MISSING else value for name, value in values.items()}
