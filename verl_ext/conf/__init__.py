"""Presets: `+verl_ext=gdpo` adds the settings of gdpo to verl's configuration, each with its default.

They are in Hydra's ConfigStore in every process that imports verl with its plugins. That of an estimator is made from
the dataclasses of its settings, and of what its module has as `PRESET`; those for machines and trainers are files.
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
    from verl_ext.registry import INSTALLED

    store = partial(config_store.ConfigStore.instance().store, group=PRESETS, package="_global_", provider=PRESETS)
    for path in FILES.glob("*.yaml"):
        store(name=path.stem, node=read_yaml(path))
    for name in INSTALLED:
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
    """The preset of an estimator: its settings and those of the estimators that it can build on, and its `PRESET`."""
    from verl_ext.registry import defaults, load, sections
    from verl_ext.settings import COMMON

    declared = load(name)
    shown = {*COMMON, name, *(declared.bases() if declared.bases else ())}
    known = {section: defaults(kind) for section, kind in sections().items() if section in shown}
    algorithm = {section: dataclasses.asdict(values) for section, values in known.items() if values is not None}
    given = {item.name: item.default for item in dataclasses.fields(declared.section)}
    if given and name not in algorithm:
        algorithm[name] = {key: None if value is dataclasses.MISSING else value for key, value in given.items()}
    return {"algorithm": {"adv_estimator": name, **algorithm}, PRESET_NAMES: {name: True}, **declared.preset}
