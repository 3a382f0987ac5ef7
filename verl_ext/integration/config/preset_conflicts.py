"""Settings of the user's own file which a preset on the command line would put back to their defaults.

Hydra merges a group that the command line adds after the primary configuration, so `--config-name mine +verl_ext=gdpo`
would silently replace what `mine.yaml` says by the preset's values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_ext.estimators import ESTIMATORS
from verl_ext.integration.config.presets import GROUP, preset

VERL = "ppo_trainer"


def lost_to_presets(config: Any) -> Iterator[str]:
    """One message for all that is lost; nothing outside `hydra.main`, where no command line is known."""
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return
    hydra = HydraConfig.get()
    primary = hydra.job.config_name
    added = [match for text in hydra.overrides.task if (match := re.fullmatch(rf"\+*{GROUP}=(.*)", text))]
    if not added or primary in (None, VERL, *ESTIMATORS) or _is_verls(hydra, primary):
        return
    mine, base = _composed(primary), _composed(VERL)
    names = [name for match in added for name in re.findall(r"\w+", match[1]) if name in ESTIMATORS]
    lost = [
        f"{path}={found} (by {value})"
        for name in names
        for path, value in _leaves(preset(name))
        if path != "algorithm.adv_estimator"
        and (found := OmegaConf.select(mine, path)) not in (None, value, OmegaConf.select(base, path))
        and OmegaConf.select(config, path) != found
    ]
    if lost:
        yield (
            f"{added[0][0]} on the command line comes after {primary}.yaml and replaces what stands there: "
            f"{', '.join(lost)}; put the preset into the file, before its own values (defaults: [{VERL}, "
            f"{GROUP}: {names[0]}, _self_]), or repeat these on the command line"
        )


def _is_verls(hydra: Any, primary: str) -> bool:
    """Whether it is a file of verl's, an experimental trainer's, whose values nobody has chosen."""
    import verl

    home = Path(verl.__file__).parent
    for source in hydra.runtime.config_sources:
        if source.schema == "pkg" and source.path.split(".")[0] == "verl":
            folder = home.joinpath(*source.path.split(".")[1:])
        else:
            folder = Path(source.path)
        if (folder / f"{primary}.yaml").is_file():
            return folder.is_relative_to(home)
    return False


def _composed(name: str) -> Any:
    """A primary configuration by itself; empty where the user's search path does not have it."""
    import hydra
    from hydra.errors import MissingConfigException

    try:
        return hydra.compose(name)
    except MissingConfigException:
        return OmegaConf.create({})


def _leaves(body: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in body.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
