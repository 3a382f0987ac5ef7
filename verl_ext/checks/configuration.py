"""Compose the configuration of a run as verl's main program does, and find settings that the configuration lacks."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf, open_dict

from verl_ext.errors import ConfigurationError, Finding, explaining_errors, nearest
from verl_ext.registry import entries_read, sections
from verl_ext.run_config import has_algorithm, select

CONFIGURATIONS_OF_VERL = "verl.trainer.config"
"""The module with the configurations of verl's entry point."""
NO_SUCH_SETTING = re.compile(r"Could not override '([\w.]+\.\w+)'")
"""Hydra's message about a setting without a plus sign that the configuration does not have."""
APPENDED = re.compile(r"\+{1,2}([\w.]+\.\w+)=")
"""An override with a plus sign, which adds a setting to a section."""
MADE_BY_WORKERS = ("actor_rollout_ref.", "critic")
"""The beginnings of the sections of which verl's workers make dataclasses, which reject unknown settings."""
SIMILAR = 0.85
"""How similar two names must be, between 0 and 1, so that one is probably a misspelled form of the other."""


@contextmanager
def composed(options: argparse.Namespace) -> Iterator[Any]:
    """Compose the configuration within Hydra's global state, as in `hydra.main`."""
    here = str(Path.cwd())
    if here not in sys.path:  # `python -m verl.trainer.main_ppo` finds modules of the user there
        sys.path.insert(0, here)
    folder, name = options.config_path, options.config_name.removesuffix(".yaml")
    if options.config is not None:
        folder, name = options.config.parent, options.config.stem
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns about engines that are not installed
        import verl  # loads our plugin, which stores the presets

        if folder is not None and not folder.is_dir():  # Hydra reads it relative to verl's entry point
            folder = Path(verl.__file__).parent / "trainer" / folder
        with _initialized(folder):
            config = _compose(name, options.overrides)
            HydraConfig.instance().set_config(config)
            try:
                with open_dict(config):
                    del config["hydra"]
                if not has_algorithm(config):
                    raise ConfigurationError(
                        f"The configuration {name} has no section `algorithm`, so it does not configure verl's PPO "
                        "trainer. Use the name of a configuration that starts from ppo_trainer."
                    )
                yield config
            finally:
                HydraConfig.instance().cfg = None


def _initialized(folder: Path | None) -> Any:
    """Initialize Hydra for the configurations of a folder, or for those of verl; return the context in which it is."""
    if folder is None:
        return hydra.initialize_config_module(CONFIGURATIONS_OF_VERL, version_base=None)
    return hydra.initialize_config_dir(str(folder.resolve()), version_base=None)


def _compose(name: str, overrides: list[str]) -> Any:
    with explaining_errors(f"The configuration {name}", ConfigurationError, "composed"):
        try:
            return hydra.compose(name, overrides=overrides, return_hydra_config=True)
        except ConfigCompositionException as error:
            missing = NO_SUCH_SETTING.search(str(error))
            if missing is None:
                raise
            raise _missing_setting(missing[1], overrides, name) from error


class KnownSettings:
    """The settings of a section: in the configuration, and in the class that verl or verl_ext makes of it."""

    def __init__(self, section: str, defaults: Any) -> None:
        """`defaults` is the configuration without the settings of the command line."""
        self.section = section
        parent, _, name = section.rpartition(".")
        self.is_of_verl_ext = parent == "algorithm" and name in entries_read()
        body: Any = select(defaults, section)
        self.in_configuration = [str(key) for key in body] if OmegaConf.is_dict(body) else []
        """The settings that the configuration has, so that they need no plus sign."""
        self.names = [*self.in_configuration]
        """These settings, and the fields of the class, which the configuration may lack."""
        self.strict_class = ""
        """The class of verl that rejects other settings. Empty if verl makes no class of the section."""
        kinds = sections()
        if parent == "algorithm" and name in kinds:
            self.names += _fields(kinds[name])
        elif OmegaConf.is_dict(body) and body.get("_target_"):
            with suppress(Exception):  # the class may need a library that is not installed
                self.names += _fields(hydra.utils.get_class(body["_target_"]))
                if section.startswith(MADE_BY_WORKERS):
                    self.strict_class = str(body["_target_"])

    def nearest(self, setting: str) -> str | None:
        """Return the name of another setting of which `setting` is probably a misspelled form."""
        near = nearest(setting, self.names, cutoff=SIMILAR)
        return None if near == setting else near

    def with_plus(self, setting: str) -> str:
        """Return the path of a setting, with plus signs if the configuration does not have it."""
        plus = "" if setting in self.in_configuration else "++"
        return f"{plus}{self.section}.{setting}"


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _missing_setting(path: str, overrides: Sequence[str], name: str) -> ConfigurationError:
    """Return the error for a setting without a plus sign that the configuration does not have."""
    section, _, setting = path.rpartition(".")
    known = KnownSettings(section, _defaults(name, overrides))
    text = f"The configuration {name} has no setting {path}."
    near = known.nearest(setting)
    if near is not None:
        return ConfigurationError(f"{text} Use {known.with_plus(near)} instead.")
    written = next((override for override in overrides if override.startswith(f"{path}=")), f"{path}=VALUE")
    if known.strict_class and setting not in known.names:
        fix = f"Remove {path}, because {known.strict_class} does not accept it either"
    elif known.is_of_verl_ext:
        fix = f"Set '++{written}', or select an estimator by its preset, which adds these settings, for example "
        fix += "+verl_ext=gdpo"
    elif setting in known.names:
        fix = f"Set '++{written}'"
    else:
        fix = f"Remove {path}. If verl or your own code reads it, set '++{written}'"
    return ConfigurationError(f"{text} {fix}.")


def misspelled_additions(overrides: Sequence[str]) -> Iterator[Finding]:
    """Warn about settings with a plus sign that verl does not accept, or that are near to another setting."""
    # Entries of `reward_kwargs` and the like are arguments of the user's code.
    added = []
    for override in overrides:
        match = APPENDED.match(override)
        if match is not None and "kwargs" not in match[1]:
            added.append(match[1])
    if not added:
        return
    defaults = _defaults(str(HydraConfig.get().job.config_name), overrides)
    for path in added:
        section, _, setting = path.rpartition(".")
        known = KnownSettings(section, defaults)
        near = known.nearest(setting)
        if known.is_of_verl_ext or setting in known.names:  # verl_ext itself reports misspelled settings
            continue
        if near is not None:
            yield Finding(
                "warning",
                f"verl's configuration has no setting {path}, but a setting {section}.{near}.",
                f"Use {known.with_plus(near)} instead. Keep {path} only if your own code reads it.",
            )
        elif known.strict_class:
            yield Finding(
                "warning",
                f"{path} is not a setting of {known.strict_class}, so verl would stop when it makes this section.",
                f"Remove {path}.",
            )


def _defaults(name: str, overrides: Sequence[str]) -> Any:
    """Return the configuration with the presets and other groups of the overrides, but without the other settings."""
    # The path of a setting has a dot, the name of a group has none: `verl_ext=gdpo`, `actor@actor_rollout_ref.actor=x`.
    groups = [override for override in overrides if "." not in re.split("[=@]", override)[0]]
    return hydra.compose(name, overrides=groups)
