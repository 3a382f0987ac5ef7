"""Rules about presets (`+verl_ext=NAME`): which one is selected, and which settings of the user's files it replaces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from verl_ext.checks.unread import leaves
from verl_ext.conf import PRESET_GROUP, SELECTED_PRESETS
from verl_ext.errors import Finding, nearest
from verl_ext.registry import ADDED_ESTIMATORS, changed_sections, load
from verl_ext.run import Run
from verl_ext.run_config import owner

Place = Literal["primary file", "other file", "command line"]
"""Where the user has written a setting. The primary file is the one of `--config-name`; it may list other files."""


class Written(NamedTuple):
    """A setting that the user has written."""

    value: Any
    place: Place


@lru_cache(maxsize=1)  # several rules ask for the same run, and Hydra takes long
def written_settings(_run: Run) -> Mapping[str, Written]:
    """Return the user's own settings by path: those of the command line and of configuration files, except verl's.

    They are those of the composition that Hydra has made last in this process, which is the configuration of the run.
    The run itself is only the key under which the result is cached.
    The result is empty in processes where Hydra has composed no configuration.
    """
    if not HydraConfig.initialized() or not GlobalHydra.instance().is_initialized():
        return {}
    hydra = HydraConfig.get()
    overrides = [*hydra.overrides.hydra, *hydra.overrides.task]
    loader = GlobalHydra.instance().config_loader()
    # All files of which the configuration consists, in the order in which they replace each other's settings.
    composition = loader.compute_defaults_list(hydra.job.config_name, overrides, RunMode.RUN)
    folders = [source.path for source in hydra.runtime.config_sources if source.schema == "file"]
    written: dict[str, Written] = {}
    for config_file in composition.defaults:
        file = _file_of_user(f"{config_file.config_path}", folders)
        if file is not None:
            content = OmegaConf.to_container(OmegaConf.load(file))
            place: Place = "primary file" if config_file.primary else "other file"
            for path, value in leaves(content, config_file.package or ""):
                written[path] = Written(value, place)
    for override in composition.config_overrides:
        key = override.key_or_group
        if override.is_delete():
            written = {path: setting for path, setting in written.items() if not f"{path}.".startswith(f"{key}.")}
            continue
        for path, value in leaves(override.value(), key):
            written[path] = Written(value, "command line")
    return written


def _file_of_user(config_path: str, folders: list[str]) -> Path | None:
    """Return the file of a part of the configuration, or None if the part is not a file or belongs to verl."""
    import verl

    name = config_path.removesuffix(".yaml") + ".yaml"
    for folder in folders:
        file = Path(folder, name)
        if file.is_file():
            return None if file.is_relative_to(Path(verl.__file__).parent) else file
    return None


def selected_presets(run: Run) -> list[str]:
    """Return the presets of estimators that the run selects."""
    return [str(name) for name in run.select(SELECTED_PRESETS) or ()]


def misspelled_group(run: Run) -> Iterator[Finding]:
    """Reject a preset under a misspelled name: `+verl_ex=gdpo` would train with verl's default estimator."""
    try:
        presets = ConfigStore.instance().list(PRESET_GROUP)
    except OSError:  # the hook that stores the presets has failed, which it has reported
        return
    for key in map(str, run.config):
        if nearest(key, [PRESET_GROUP], cutoff=0.75) is None:
            continue
        value: Any = run.select(key)
        names: Any = OmegaConf.to_container(value) if OmegaConf.is_list(value) else [value]
        if not any(f"{name}.yaml" in presets for name in names):
            continue
        text = f"[{','.join(map(str, names))}]" if OmegaConf.is_list(value) else f"{value}"
        yield Finding(
            "error",
            f"The setting {key}={text} does not select a preset. Presets belong to the group {PRESET_GROUP} of Hydra.",
            f"Remove {key}={text}. Add '+{PRESET_GROUP}={text}' to the command line, or `{PRESET_GROUP}: {text}` to "
            "`defaults` in the configuration file.",
        )


def conflicting_preset(run: Run) -> Iterator[Finding]:
    """Reject the preset of an estimator that is not the one in force."""
    for name in selected_presets(run):
        text = f"The preset {name} conflicts with algorithm.adv_estimator={run.name}"
        if name != run.name:
            yield Finding(
                "error",
                f"{text}.",
                f"Keep one of the two. In a configuration file, list `{PRESET_GROUP}: {name}` after `ppo_trainer` in "
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
    based = run.methods[1:]
    presets = selected_presets(run)
    if based:
        change, replaced = f"set algorithm.{run.name}.base={name}", based
    elif presets:
        return f"use the preset {name} instead of {' and '.join(presets)}"
    else:
        change, replaced = f"set algorithm.adv_estimator={name}", run.methods
    changed = changed_sections(run.settings)
    unused = [f" and remove algorithm.{section}" for section in replaced if section in changed]
    return change + "".join(unused)


def preset_after_settings(run: Run) -> Iterator[Finding]:
    """Reject a preset that replaces settings of the user's files, because it comes after them."""
    presets = selected_presets(run)
    if not presets:
        return
    replaced = _replaced_settings(run, presets)
    if not replaced:
        return
    paths, name, file = ", ".join(replaced), " and ".join(presets), HydraConfig.get().job.config_name
    files = f"file {file}"
    place = f"`{PRESET_GROUP}: {name}` before `_self_`"
    fix = f"Write {place} in the `defaults` of {file}, or set {paths} on the command line."
    if "other file" in replaced.values():  # a file in the defaults, which has the trainer's defaults before it
        files = "files"
        fix = f"Set {paths} in {file} itself, with {place} in its `defaults`, or on the command line."
    text = f"The preset {name} comes after the settings of the configuration {files} and replaces {paths}."
    yield Finding("error", text, fix)


def _replaced_settings(run: Run, presets: Iterable[str]) -> dict[str, Place]:
    """Return the settings of the user's files that have another value in the run, with the file that sets each.

    Presets set entries of `algorithm`, and some set more, for example the loss. Three kinds of settings may differ from
    the run: the estimator, which `conflicting_preset` reports, settings with an interpolation, and settings of the
    loss in a file from which the primary file starts, because the preset of drgrpo is meant to replace them.
    """
    settings_of_presets = [path for preset in presets for path, _ in leaves(dict(load(preset).preset))]
    beginnings_by_place: dict[Place, tuple[str, ...]] = {
        "primary file": ("algorithm.", *settings_of_presets),
        "other file": ("algorithm.",),
    }
    composed = dict(leaves(OmegaConf.to_container(run.config)))
    replaced: dict[str, Place] = {}
    for path, (value, place) in written_settings(run).items():
        may_be_set_by_preset = path.startswith(beginnings_by_place.get(place, ()))
        may_differ = path == "algorithm.adv_estimator" or "${" in str(value)
        if may_be_set_by_preset and not may_differ and composed.get(path) != value:
            replaced[path] = place
    return replaced


def replaced_preset(run: Run) -> Iterator[Finding]:
    """Warn about verl's default estimator if the settings speak of another one.

    `verl_ext=cpu` may have replaced the preset of the file. Or `algorithm.rewards.keys` are set without an estimator.
    """
    if run.name != "gae" or selected_presets(run):  # with a preset, `conflicting_preset` reports a conflict
        return
    written = written_settings(run)
    if "algorithm.adv_estimator" in written:
        return
    of_file = _presets_in_defaults(written)
    estimators = [name for name in of_file if name in ADDED_ESTIMATORS]
    default = "verl would train with its default estimator, gae."
    if estimators:
        text = f"The preset {estimators[0]} of {HydraConfig.get().job.config_name} is replaced. {default}"
    elif "algorithm.rewards.keys" in written:
        text = f"algorithm.rewards.keys is set, but no estimator is selected. {default}"
    else:
        return
    names = [*(_presets_on_command_line() or of_file), *(estimators[:1] or ["gdpo"])]
    value = names[0] if len(names) == 1 else f"[{','.join(names)}]"
    yield Finding("warning", text, f"Set '{'' if of_file else '+'}{PRESET_GROUP}={value}'.")


def _presets_in_defaults(written: Mapping[str, Written]) -> list[str]:
    """Return the presets in the list `defaults` of the user's configuration file."""
    if "defaults" not in written:
        return []
    presets: list[str] = []
    for entry in written["defaults"].value:
        selected = entry.get(PRESET_GROUP, []) if isinstance(entry, dict) else []
        presets += selected if isinstance(selected, list) else [selected]
    return presets


def _presets_on_command_line() -> list[str]:
    """Return the value of `verl_ext=...` on the command line."""
    overrides = [text.lstrip("+") for text in HydraConfig.get().overrides.task]
    return [text.partition("=")[2].strip("[]") for text in overrides if text.startswith(f"{PRESET_GROUP}=")]
