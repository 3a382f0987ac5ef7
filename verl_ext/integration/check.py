"""`verl-ext check`: check a configuration of verl without starting the run.

The configuration is composed as by `python -m verl.trainer.main_ppo`, from the same folder and with the same presets,
and gets the same checks as before a run. Neither Ray nor a model is started.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.conf import GROUP
from verl_ext.errors import ConfigurationError, VerlExtError, nearest, unknown

if TYPE_CHECKING:
    from verl_ext.integration.config.checks import Verdict

HOME = "verl.trainer.config"
"""The module with the configurations of verl's entry point."""
PRIMARY = "ppo_trainer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command: the same as verl's, so that a command line can be pasted."""
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="settings as on verl's command line")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a YAML file: a primary configuration with `defaults`, or a complete one as printed by `--cfg job`",
    )
    parser.add_argument("--config-name", "-cn", metavar="NAME", help=f"a primary configuration, {PRIMARY} by default")
    parser.add_argument("--multirun", "-m", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--config-path", "-cp", type=Path, metavar="FOLDER", help=f"its folder, {HOME} by default")


def check(options: argparse.Namespace) -> tuple[str, int]:
    """The text to print, and the exit status: 1 if there are errors."""
    if options.multirun:
        raise ConfigurationError("--multirun: this command checks one run; give it each choice of the sweep by itself")
    folder, name = _where(options)
    for text in options.overrides:
        if "=" not in text and not text.startswith("~"):
            raise ConfigurationError(
                f"{text!r} is not KEY=VALUE: a setting is written as on verl's command line, a preset as "
                "+verl_ext=gdpo, and a file as --config=FILE.yaml"
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns about engines that are not installed
        with composed(folder, name, options.overrides) as config:
            from verl_ext.integration.config.checks import judge

            verdict = judge(config, unregistered=True)
            lines = [*_judged(verdict, config), *_complaints("error", verdict.errors)]
            lines += _complaints("warning", verdict.warnings)
    refused = bool(verdict.errors)
    lines.append(f"verl_ext {'refuses' if refused else 'accepts'} this run; verl's own checks did not run")
    return "\n".join(lines), int(refused)


def _where(options: argparse.Namespace) -> tuple[Path | None, str]:
    """Folder and name of the primary configuration; the folder is None for verl's own."""
    file: Path | None = options.config
    if file is None:
        return options.config_path, options.config_name or PRIMARY
    if options.config_name is not None or options.config_path is not None:
        raise ConfigurationError(f"--config={file} is folder and name in one: remove --config-name and --config-path")
    if file.suffix != ".yaml" or not file.is_file():
        raise ConfigurationError(f"--config={file} must be an existing file whose name ends in .yaml, as Hydra's do")
    return file.parent, file.stem


@contextmanager
def composed(folder: Path | None, name: str, overrides: list[str]) -> Iterator[Any]:
    """The configuration that verl's entry point would get; Hydra's global state is set as within `hydra.main`."""
    try:
        import hydra
        import verl  # noqa: F401 - loads our plugin, which stores the presets
        from hydra.core.hydra_config import HydraConfig
        from hydra.errors import HydraException
        from omegaconf import OmegaConf, open_dict
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError
    except ImportError as error:
        raise ConfigurationError(f"this command needs verl and Hydra to compose a configuration: {error}") from error
    home: Any
    if folder is None:
        home = hydra.initialize_config_module(HOME, version_base=None)
    elif folder.is_dir():
        home = hydra.initialize_config_dir(str(folder.resolve()), version_base=None)
    else:
        raise ConfigurationError(f"--config-path={folder} is not a folder")
    with home:
        try:
            config = hydra.compose(name, overrides=overrides, return_hydra_config=True)
        except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
            reason = _not_found(error, name, overrides) or "".join([*_misspelt(overrides), _chain_of(error)])
            raise ConfigurationError(f"the configuration {name} cannot be composed: {reason}") from error
        HydraConfig.instance().set_config(config)
        try:
            with open_dict(config):
                del config["hydra"]
            if not OmegaConf.is_dict(config.get("algorithm")):
                raise ConfigurationError(f"{name} has no section `algorithm`: it is not a configuration of verl's PPO")
            yield config
        finally:
            HydraConfig.instance().cfg = None


def _not_found(error: BaseException, name: str, overrides: list[str]) -> str | None:
    """The message for a preset or a primary configuration that does not exist; None for another error."""
    from hydra.core.global_hydra import GlobalHydra
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    from verl_ext.registry import ESTIMATORS, declaration

    group, _, found = (getattr(error, "missing_cfg_file", None) or "").rpartition("/")
    if not found or group not in ("", GROUP):
        return None
    loader = GlobalHydra.instance().config_loader()
    options = loader.get_group_options(group, config_name=name, overrides=overrides)
    valid = [each for each in options if not each.startswith("_")]
    if not group:
        return f"{unknown('configuration', found, valid)}. {error}"
    if found in ESTIMATORS:
        declaration(found)  # raises: a broken one has no preset
    elif found in ADV_ESTIMATOR_REGISTRY:
        return f"{found} is verl's own and has no preset: write algorithm.adv_estimator={found}"
    near = nearest(found, valid) or "NAME"
    return f"{unknown('preset', found, valid)}: write +{GROUP}={near}, or in a file's defaults `{GROUP}: {near}`"


def _misspelt(overrides: list[str]) -> Iterator[str]:
    """Messages about overrides of our sections that Hydra does not know, with the nearest name."""
    from verl_ext.integration.config.read import misspelt
    from verl_ext.settings import sections

    known = sections()
    for text in overrides:
        key = text.partition("=")[0].lstrip("+~")
        match key.split("."):
            case ["algorithm", section, setting, *_] if section in known:
                valid = [item.name for item in fields(known[section])]
                if setting not in valid:
                    yield f"algorithm.{section}: {unknown('setting', setting, valid)}. "
            case ["algorithm", section, _, *_]:
                yield from (f"{message} " for message in misspelt([section]))


def _chain_of(error: BaseException) -> str:
    """The message of Hydra's error with that of its cause, which has the details."""
    message = str(error)
    cause = error.__cause__
    return message if cause is None or str(cause) in message else f"{message}: {cause}"


def _judged(verdict: Verdict, config: Any) -> Iterator[str]:
    """Lines about the run that was checked."""
    from verl_ext.integration.config.read import select

    actor = "actor_rollout_ref.actor"
    yield "checked"
    steps = "" if verdict.chain is None else f" ({', '.join(step.name for step in verdict.chain.steps)})"
    yield f"  estimator  {verdict.name}{steps}"
    if verdict.settings is None:
        yield "  settings   cannot be read, so what depends on them was not checked"
    else:
        rewards = verdict.settings.rewards
        weights = "" if rewards.weights is None else f", weights {', '.join(f'{one:g}' for one in rewards.weights)}"
        yield f"  rewards    {', '.join(rewards.keys or ('the score alone',))}{weights}"
    if verdict.chain is not None:
        over = (getattr(step, "over", "") for step in verdict.chain.steps if step.name == "whiten")
        yield f"  whiten     {next((f'over {name}' for name in over), 'none')}"
    loss = [f"{key}={select(config, f'{actor}.{key}')}" for key in ("loss_agg_mode", "loss_scale_factor")]
    yield f"  loss       {select(config, f'{actor}.policy_loss.loss_mode')}, {', '.join(loss)}"


def _complaints(kind: str, texts: tuple[str, ...]) -> Iterator[str]:
    yield f"{len(texts)} {kind}{'' if len(texts) == 1 else 's'}"
    for text in texts:
        yield f"  - {text}"
