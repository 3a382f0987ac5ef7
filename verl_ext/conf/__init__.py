"""Hydra configurations: `+verl_ext=cpu` adds `verl_ext/cpu.yaml` to verl's own configuration.

They are in Hydra's ConfigStore in every process that imports verl with its plugins; elsewhere
`hydra.searchpath=[pkg://verl_ext.conf]` finds the same files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

GROUP = "verl_ext"
FILES = Path(__file__).parent / GROUP
"""The folder of the presets that are files."""


def store(config_store: Any) -> None:
    """Put every file of the group into Hydra's ConfigStore, at the top of the configuration."""
    import yaml

    # This runs in every process that imports hydra; the loader written in Python takes ten times as long.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for path in sorted(FILES.glob("*.yaml")):
        node = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)  # noqa: S506 - a safe loader
        config_store.store(group=GROUP, name=path.stem, node=node, package="_global_", provider="verl_ext")
