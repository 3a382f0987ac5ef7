"""Find conflicts between the presets in a configuration and the rest of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from verl_ext.errors import listed, nearest
from verl_ext.integration.config.presets import GROUP, MARKER, preset, without_values
from verl_ext.integration.config.read import estimator_name, select
from verl_ext.settings import sections

logger = logging.getLogger("verl_ext")

ESTIMATOR = "algorithm.adv_estimator"
VERLS = "hydra.searchpath=[pkg://verl.trainer.config]"


def preset_conflicts(config: Any) -> Iterator[str]:
    """Messages about presets that are misplaced, mixed, or in conflict with the estimator or the user's values."""
    composed, estimator = _plain(config), estimator_name(config)
    marks = [path.rpartition(f"{MARKER}.") for path, _ in _leaves(composed)]
    names = [name for place, mark, name in marks if mark and not place]
    for place, mark, name in marks:
        if mark and place:
            yield (
                f"the preset {name} is under {place[:-1]}, where it has no effect: write +{GROUP}={name} "
                f"(in a file {GROUP}: {name}), without a package"
            )
    if len(names) > 1:
        yield (
            f"a run has one estimator, but these presets are combined: {listed(names)}; keep one of "
            + ", ".join(f"+{GROUP}={name} (in a file {GROUP}: {name})" for name in names)
        )
    elif names:
        (name,) = names
        if name != estimator:
            yield (
                f"the preset {name} is set, but so is {ESTIMATOR}={estimator}, which does not use the preset's "
                f"settings: remove {ESTIMATOR}={estimator} (in a file adv_estimator: {estimator}) to train "
                f"with {name} (in a file's defaults the preset comes after ppo_trainer), or remove +{GROUP}={name} (in "
                f"a file {GROUP}: {name}) to train with {estimator}"
            )
        yield from _replaced(composed, name)


def misplaced(config: Any) -> Iterator[str]:
    """Entries at the top of a configuration that nothing reads there: our sections, and a misspelt preset."""
    known = sections()
    for key in map(str, config):
        meant = nearest(key, [GROUP], cutoff=0.75) if key != MARKER else None
        if key not in known and meant is None:
            continue
        problem = f"{key} at the top of the configuration is not read and would be ignored"
        value = select(config, key)
        if key in known and OmegaConf.is_dict(value):
            yield f"{problem}: write algorithm.{key}.NAME=... (with a + where no preset is used)"
        elif meant is not None and isinstance(value, str):
            yield (
                f"{problem}: a preset is chosen by +{GROUP}={value} on the command line, or by `{GROUP}: {value}` in a "
                "file's defaults"
            )


def _replaced(composed: Mapping[str, Any], name: str) -> Iterator[str]:
    """One message for all the user's values that the preset replaced.

    This composes the configuration again with a preset that sets nothing, and compares. It needs Hydra's global state
    within `hydra.main`, which holds the files and the command line.
    """
    import hydra
    from hydra.core import config_store
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    if not (HydraConfig.initialized() and GlobalHydra.instance().is_initialized()):
        return
    run = HydraConfig.get()
    # Hydra rejects `~KEY` for a key without a value, as here; a deleted value is not replaced anyway.
    overrides = [text for text in (*run.overrides.hydra, *run.overrides.task) if not text.startswith("~")]
    # With `+verl_ext=NAME` on the command line the user chose the estimator.
    chosen = any(re.match(rf"\+?{GROUP}(@[^=]*)?=.*\b{name}\b", text) for text in run.overrides.task)
    try:
        with without_values(config_store):
            own = _plain(hydra.compose(run.job.config_name, overrides))
            replaced = [
                (path, before, value)
                for path, value in _leaves(preset(name))
                if _at(composed, path) == value
                and (before := _at(own, path)) not in ("???", value)
                and not (path == ESTIMATOR and chosen)
            ]
            verls = _plain(hydra.compose(name, [VERLS])) if replaced else {}
    except HydraException as error:
        logger.warning("could not check whether the preset %s replaced values of your own: %s", name, error)
        return
    lost = [f"{path}={before} (by {value})" for path, before, value in replaced if before != _at(verls, path)]
    if lost:
        yield (
            f"the preset {name} comes after the file with these values and replaces them: {', '.join(lost)}; put it "
            f"right after ppo_trainer in the file's defaults (defaults: [ppo_trainer, {GROUP}: {name}, _self_]), or "
            "set the values on the command line"
        )


def _plain(config: Any) -> dict[str, Any]:
    container: Any = OmegaConf.to_container(config, resolve=False)
    return dict(container)


def _at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _leaves(body: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in body.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
