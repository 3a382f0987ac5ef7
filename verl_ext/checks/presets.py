"""Rules about presets (`+verl_ext=NAME`): which one is selected, and which settings of the user's files it replaces."""

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
from verl_ext.registry import ADDED_ESTIMATORS, changed_sections, load
from verl_ext.run import Run


def other_preset(run: Run) -> Iterator[Finding]:
    """Reject the preset of an estimator that is not the one in force."""
    for name in run.select(PRESET_NAMES) or ():
        text = f"The preset {name} conflicts with algorithm.adv_estimator={run.name}"
        if name != run.name:
            yield Finding(
                "error",
                f"{text}.",
                f"Keep one of the two. In a configuration file, list `{PRESETS}: {name}` after `ppo_trainer` in "
                "`defaults`.",
            )
        elif not run.computes_advantages:
            yield Finding(
                "error",
                f"{text}, because {owner(name)} has registered an estimator under this name. The settings of the "
                "preset belong to the estimator of verl_ext.",
                f"Remove the preset and set algorithm.adv_estimator={name} to use the registered estimator. To use "
                "the one of verl_ext, uninstall the package that registers the other.",
            )


def other_estimator(run: Run, name: str) -> str:
    """Say how a run selects another estimator: as the base of the current one, by a preset, or by the setting."""
    if based := run.methods[1:]:
        chosen, replaced = f"set algorithm.{run.name}.base={name}", based
    elif presets := run.select(PRESET_NAMES):
        return f"use the preset {name} instead of {' and '.join(presets)}"
    else:
        chosen, replaced = f"set algorithm.adv_estimator={name}", run.methods
    unused = [f" and remove algorithm.{section}" for section in replaced if section in changed_sections(run.settings)]
    return chosen + "".join(unused)


def written() -> dict[str, tuple[Any, str]]:
    """Return the user's own settings: by path, the value and its place ("primary" file, another "file", or "typed").

    The files of verl are excluded. The result is empty in processes where Hydra has composed no configuration.
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


def late_preset(run: Run) -> Iterator[Finding]:
    """Reject a preset that replaces settings of the user's files, because it comes after them."""
    presets = run.select(PRESET_NAMES) or ()
    beside = tuple(path for preset in presets for path, _ in leaves(dict(load(preset).preset)))
    # drgrpo's preset may replace the loss of the file that the primary file starts from.
    kept = {"primary": ("algorithm.", *beside), "file": ("algorithm.",), "typed": ()}
    composed = dict(leaves(OmegaConf.to_container(run.config)))
    lost = {
        path: place
        for path, (value, place) in (written() if presets else {}).items()
        if path != "algorithm.adv_estimator" and "${" not in str(value) and composed.get(path) != value
        if path.startswith(kept[place])
    }
    if lost:
        paths, name, file = ", ".join(lost), " and ".join(presets), HydraConfig.get().job.config_name
        replaced = f"The preset {name} comes after the settings of the configuration file"
        if "file" in lost.values():  # of a file in the defaults, which has the trainer's defaults before it
            text = f"{replaced}s and replaces {paths}."
            fix = f"Set {paths} in {file} itself, with `{PRESETS}: {name}` before `_self_` in its `defaults`, or on "
        else:
            text = f"{replaced} {file} and replaces {paths}."
            fix = f"Write `{PRESETS}: {name}` before `_self_` in the `defaults` of {file}, or set {paths} on "
        yield Finding("error", text, f"{fix}the command line.")


def replaced_preset(run: Run) -> Iterator[Finding]:
    """Warn about verl's default estimator if it is not chosen: `verl_ext=cpu` may have replaced the file's preset."""
    found = written() if run.name == "gae" else {}
    parts = [part[PRESETS] for part in found.get("defaults", ((), ""))[0] if isinstance(part, dict) and PRESETS in part]
    of_file = [name for part in parts for name in (part if isinstance(part, list) else [part])]
    estimators = [name for name in of_file if name in ADDED_ESTIMATORS]
    if "algorithm.adv_estimator" in found or not (estimators or "algorithm.rewards.keys" in found):
        return
    if run.select(PRESET_NAMES):  # then `other_preset` reports a conflict
        return
    overrides = HydraConfig.get().overrides.task
    typed = [text.partition("=")[2].strip("[]") for text in overrides if text.lstrip("+").startswith(f"{PRESETS}=")]
    default = "verl would train with its default estimator, gae."
    if estimators:
        text = f"The preset {estimators[0]} of {HydraConfig.get().job.config_name} is replaced. {default}"
    else:
        text = f"algorithm.rewards.keys is set, but no estimator is selected. {default}"
    chosen = [*(typed or of_file), *(estimators[:1] or ["gdpo"])]
    value = chosen[0] if len(chosen) == 1 else f"[{','.join(chosen)}]"
    yield Finding("warning", text, f"Set '{'' if of_file else '+'}{PRESETS}={value}'.")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path of each setting below a path, with its value."""
    if not isinstance(value, dict):
        yield path, value
        return
    for name, inner in value.items():
        yield from leaves(inner, f"{path}.{name}".strip("."))
