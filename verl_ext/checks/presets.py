"""Rules about presets (`+verl_ext=NAME`): which one, and what of the user's files it replaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from verl_ext.conf import PRESET_NAMES, PRESETS
from verl_ext.errors import Finding
from verl_ext.names import owner
from verl_ext.registry import INSTALLED, load
from verl_ext.run_config import RunConfig


def other_preset(run: RunConfig) -> Iterator[Finding]:
    """A preset of an estimator that is not the one in force."""
    for name in run.select(PRESET_NAMES) or ():
        if name != run.name or not run.computes:
            other = "" if name != run.name else f", which {owner(name)} has registered,"
            yield Finding(
                f"the preset {name} and algorithm.adv_estimator={run.name}{other} are both set: keep one of them. In a "
                f"file's `defaults`, {PRESETS}: {name} stands after ppo_trainer"
            )


def written() -> dict[str, tuple[Any, str]]:
    """What the user has written: by path the value, and where: in the "primary" file, another "file", or "typed".

    verl's files are not his. Nothing in processes where Hydra has composed nothing.
    """
    if not HydraConfig.initialized():
        return {}
    import verl

    hydra, loader = HydraConfig.get(), GlobalHydra.instance().config_loader()
    overrides = [*hydra.overrides.hydra, *hydra.overrides.task]
    composition = loader.compute_defaults_list(hydra.job.config_name, overrides, RunMode.RUN)
    homes = [source.path for source in hydra.runtime.config_sources if source.schema == "file"]
    found: dict[str, tuple[Any, str]] = {}
    for part in composition.defaults:
        files = (Path(home, f"{part.config_path}".removesuffix(".yaml") + ".yaml") for home in homes)
        if (file := next(filter(Path.is_file, files), None)) and not file.is_relative_to(Path(verl.__file__).parent):
            body = leaves(OmegaConf.to_container(OmegaConf.load(file)), part.package or "")
            found |= {path: (value, "primary" if part.primary else "file") for path, value in body}
    for override in composition.config_overrides:
        key = override.key_or_group
        if override.is_delete():
            found = {path: entry for path, entry in found.items() if not f"{path}.".startswith(f"{key}.")}
        else:
            found |= {path: (value, "typed") for path, value in leaves(override.value(), key)}
    return found


def late_preset(run: RunConfig) -> Iterator[Finding]:
    """Settings of the user's files that a preset replaces, because it comes after them."""
    presets = run.select(PRESET_NAMES) or ()
    beside = tuple(path for preset in presets for path, _ in leaves(dict(load(preset).preset)))
    # drgrpo's preset may replace the loss of the file that the primary file starts from.
    kept = {"primary": ("algorithm.", *beside), "file": ("algorithm.",), "typed": ()}
    composed = dict(leaves(OmegaConf.to_container(run.config)))
    lost = [
        path
        for path, (value, place) in (written() if presets else {}).items()
        if path != "algorithm.adv_estimator" and "${" not in str(value) and composed.get(path) != value
        if path.startswith(kept[place])
    ]
    if lost:
        yield Finding(
            f"a preset replaces {', '.join(lost)} of {HydraConfig.get().job.config_name}, because it comes later: "
            f"write `{PRESETS}: NAME` before `_self_` in its `defaults`, or set them on the command line"
        )


def replaced_preset(run: RunConfig) -> Iterator[Finding]:
    """verl's default estimator where nobody chose it: `verl_ext=cpu` has replaced the preset of the user's file."""
    found = written() if run.name == "gae" else {}
    parts = [part.get(PRESETS) for part in found.get("defaults", ((), ""))[0] if isinstance(part, dict)]
    names = [name for part in parts for name in (part if isinstance(part, list) else [part]) if name in INSTALLED]
    if "algorithm.adv_estimator" not in found and (names or "algorithm.rewards.keys" in found):
        plus, name = ("", names[0]) if names else ("+", "gdpo")
        yield Finding(
            f"verl's default gae trains, because nothing chooses another estimator: write {plus}{PRESETS}={name}, "
            f"for example, or '{plus}{PRESETS}=[cpu,{name}]'",
            fatal=False,
        )


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of each setting below a path, with its value."""
    if not isinstance(value, dict):
        yield path, value
        return
    for name, inner in value.items():
        yield from leaves(inner, f"{path}.{name}".strip("."))
