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
from verl_ext.errors import Complaint
from verl_ext.names import owner
from verl_ext.registry import load
from verl_ext.run_config import RunConfig


def other_preset(run: RunConfig) -> Iterator[Complaint]:
    """A preset of an estimator that is not the one in force."""
    for name in run.select(PRESET_NAMES) or ():
        if name != run.name or not run.computes:
            other = "" if name != run.name else f", which {owner(name)} has registered,"
            yield Complaint(
                f"the preset {name} and algorithm.adv_estimator={run.name}{other} are both set: keep one of them. In a "
                f"file's `defaults`, {PRESETS}: {name} stands after ppo_trainer"
            )


def late_preset(run: RunConfig) -> Iterator[Complaint]:
    """Settings of the user's files that a preset replaces, because it comes after them."""
    if not HydraConfig.initialized() or not run.select(PRESET_NAMES):  # in the trainer's process, or without a preset
        return
    hydra, loader = HydraConfig.get(), GlobalHydra.instance().config_loader()
    name, overrides = hydra.job.config_name, [*hydra.overrides.hydra, *hydra.overrides.task]
    composition = loader.compute_defaults_list(name, overrides, RunMode.RUN)
    homes = [source.path for source in hydra.runtime.config_sources if source.schema == "file"]
    beside = tuple(path for preset in run.select(PRESET_NAMES) for path, _ in leaves(dict(load(preset).preset)))
    written: dict[str, Any] = {}
    for part in composition.defaults:
        files = (Path(home, f"{part.config_path}".removesuffix(".yaml") + ".yaml") for home in homes)
        if (file := next(filter(Path.is_file, files), None)) is not None:
            found = leaves(OmegaConf.to_container(OmegaConf.load(file)), part.package or "")
            # drgrpo's preset may replace the loss of the file that the primary file starts from.
            kept = ("algorithm.", *beside) if part.primary else ("algorithm.",)
            written |= {path: value for path, value in found if path.startswith(kept)}
    typed = tuple(f"{override.key_or_group}." for override in composition.config_overrides)
    composed = dict(leaves(OmegaConf.to_container(run.config)))
    lost = [
        path
        for path, value in written.items()
        if path != "algorithm.adv_estimator" and "${" not in str(value) and composed.get(path) != value
        if not f"{path}.".startswith(typed)
    ]
    if lost:
        yield Complaint(
            f"a preset replaces {', '.join(lost)} of {name}, because it comes later: write `{PRESETS}: NAME` before "
            "`_self_` in its `defaults`, or set them on the command line"
        )


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of each setting below a path, with its value."""
    if not isinstance(value, dict):
        yield path, value
        return
    for name, inner in value.items():
        yield from leaves(inner, f"{path}.{name}".strip("."))
