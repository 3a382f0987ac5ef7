"""Find conflicts between the presets in a configuration and the rest of it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from verl_ext.conf import FILES, GROUP, MARKER
from verl_ext.errors import listed, nearest
from verl_ext.integration.config.read import estimator_name, select
from verl_ext.registry import ESTIMATORS
from verl_ext.settings import sections

logger = logging.getLogger("verl_ext")

ESTIMATOR = "algorithm.adv_estimator"
SELF = "_self_"
VERLS = "hydra.searchpath=[pkg://verl.trainer.config]"


def preset_conflicts(config: Any) -> Iterator[str]:
    """Messages about presets that are misplaced, mixed, or in conflict with the estimator or the user's values."""
    yield from _after_self()
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


def misplaced(config: Any) -> Iterator[str]:
    """Sections of ours at the top of a configuration, where nothing reads them."""
    for key in sections():
        if key in config and OmegaConf.is_dict(select(config, key)):
            yield f"{_unread(key)}: write algorithm.{key}.NAME=... (with a + where no preset is used)"


def misspelt_group(config: Any) -> Iterator[str]:
    """Entries at the top of a configuration that choose a preset under a misspelt name."""
    valid = {*ESTIMATORS, *(path.stem for path in FILES.glob("*.yaml"))}
    for key in map(str, config):
        if key == MARKER or nearest(key, [GROUP], cutoff=0.75) is None:
            continue
        value = select(config, key)
        names = [value] if isinstance(value, str) else list(value) if OmegaConf.is_list(value) else []
        if not names or (key != GROUP and not any(nearest(name, valid, cutoff=0.75) for name in names)):
            continue
        chosen = names[0] if isinstance(value, str) else f"[{','.join(map(str, names))}]"
        yield f"{_unread(key)}: did you mean +{GROUP}={chosen} (in a file's defaults `{GROUP}: {chosen}`)?"


def _unread(key: str) -> str:
    return f"{key} at the top of the configuration is not read and would be ignored"


def _after_self() -> Iterator[str]:
    """One message for each of the user's files that has a preset after `_self_` in its defaults.

    This needs Hydra's global state within `hydra.main`, as `_replaced` does.
    """
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode

    given = _command_line()
    if given is None:
        return
    name, overrides = given
    # Hydra adds presets of the command line behind the primary file's own, where the user wants them.
    others = [text for text in overrides if not re.match(rf"\+{GROUP}(@[^=]*)?=", text)]
    try:
        tree = GlobalHydra.instance().config_loader().compute_defaults_list(name, others, RunMode.RUN).defaults_tree
    except HydraException as error:  # a file may override the preset of the command line, which is left out here
        logger.debug("could not check where presets stand in your files: %s", error)
        return
    for file, entries in _defaults(tree):
        own = entries.index(SELF) if SELF in entries else len(entries)
        late = [entry for entry in entries[own:] if entry.startswith(f"{GROUP}: ")]
        if late:
            last = max(at for at, entry in enumerate(entries) if entry in late)
            right = [*entries[:own], *entries[own + 1 : last + 1], SELF, *entries[last + 1 :]]
            yield (
                f"{file}.yaml has `defaults: [{', '.join(entries)}]`: {' and '.join(late)} stands after {SELF}, where "
                f"it would replace settings of the file itself: write `defaults: [{', '.join(right)}]`"
            )


def _defaults(tree: Any) -> Iterator[tuple[str, list[str]]]:
    """Each file of Hydra's tree of defaults with its entries, in order and as a file has them."""
    children = [child for child in tree.children or () if child is not None]
    nodes = [node for node in (getattr(child, "node", child) for child in children) if _own(node)]
    entries: list[str] = []
    for node in nodes:
        path = SELF if node.is_self() else str(node.get_config_path())
        group, package = getattr(node, "group", None), getattr(node, "package", None)
        # A preset under another package is no preset: `preset_conflicts` says so.
        if not path.startswith(f"{GROUP}/") or package not in (None, "_global_"):
            entries.append(f"{group}{f'@{package}' if package else ''}: {node.value}" if group else path)
        elif entries and entries[-1].startswith(f"{GROUP}: "):  # Hydra has taken a list apart
            known = entries.pop().removeprefix(f"{GROUP}: ").strip("[]")
            entries.append(f"{GROUP}: [{known}, {path.removeprefix(f'{GROUP}/')}]")
        else:
            entries.append(f"{GROUP}: {path.removeprefix(f'{GROUP}/')}")
    if type(tree.node).__name__ != "VirtualRoot":
        yield str(tree.node.get_config_path()), entries
    for child in children:
        if hasattr(child, "children"):
            yield from _defaults(child)


def _own(node: Any) -> bool:
    """Whether the file chooses it itself: not an empty placeholder, and not what the command line puts in its place."""
    return not (getattr(node, "config_name_overridden", False) or (getattr(node, "group", None) and node.value is None))


def _command_line() -> tuple[str | None, list[str]] | None:
    """The primary configuration and the command line of the run; None without Hydra's state, as in the trainer."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig

    if not (HydraConfig.initialized() and GlobalHydra.instance().is_initialized()):
        return None
    run = HydraConfig.get()
    # An interpolation in an override refers to the run's own configuration, not to this one of Hydra's.
    given: Any = OmegaConf.to_container(run.overrides, resolve=False)
    return run.job.config_name, [*given["hydra"], *given["task"]]


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
