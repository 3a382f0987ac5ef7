"""`verl-ext check`: print every error and warning of a configuration, without a run.

The configuration is composed as by `python -m verl.trainer.main_ppo`, with the same command line and presets. Neither
Ray nor a model is started. The exit status is 1 if the run would be refused.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_ext.errors import ConfigurationError
from verl_ext.files import say
from verl_ext.integration.checks import Verdict, judge
from verl_ext.integration.checks.read import ACTOR, select
from verl_ext.integration.checks.rewards import FUNCTION, accuracy_of, components
from verl_ext.integration.checks.try_reward import try_reward
from verl_ext.registry import ESTIMATORS

VERL = "verl.trainer.config"
"""The module with the configurations of verl's entry point."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command: those of verl, so that a command line can be pasted."""
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="settings as on verl's command line")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a primary configuration: its folder and name in one"
    )
    parser.add_argument("--config-path", "-cp", type=Path, metavar="FOLDER", help=f"{VERL} by default")
    parser.add_argument("--config-name", "-cn", default="ppo_trainer", metavar="NAME", help="ppo_trainer by default")
    parser.add_argument(
        "--try-reward", action="store_true", help="call the reward function on rows of the training file"
    )
    parser.add_argument("--rows", type=int, default=8, help="how many, 8 by default")
    parser.add_argument(
        "--answers", type=Path, metavar="FILE", help="a text file with an answer to each of them, by line"
    )


def check(options: argparse.Namespace) -> int:
    """Print what the run would do and be told; return 1 if it would be refused."""
    folder, name = options.config_path, options.config_name
    if options.config is not None:
        folder, name = options.config.parent, options.config.stem
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns about engines that are not installed
        lines, refused = _judged(folder, name, options)
    lines.append(f"verl_ext {'refuses' if refused else 'accepts'} this run; verl's own checks did not run")
    say("\n".join(lines))
    return int(refused)


def _judged(folder: Path | None, name: str, options: argparse.Namespace) -> tuple[list[str], bool]:
    """Compose the configuration within Hydra's global state, as in `hydra.main`, and judge it."""
    import verl  # noqa: F401 - loads our plugin, which stores the presets

    module: Any = hydra.initialize_config_module
    files: Any = hydra.initialize_config_dir
    with module(VERL, version_base=None) if folder is None else files(str(folder.resolve()), version_base=None):
        try:
            config = hydra.compose(name, overrides=options.overrides, return_hydra_config=True)
        except (HydraException, OmegaConfBaseException) as error:
            cause = f": {error.__cause__}" if error.__cause__ is not None else ""
            raise ConfigurationError(f"Hydra cannot compose {name}: {error}{cause}") from error
        HydraConfig.instance().set_config(config)
        try:
            with open_dict(config):
                del config["hydra"]
            if "algorithm" not in config:
                raise ConfigurationError(f"{name} has no section `algorithm`: it is not a configuration of verl's PPO")
            verdict = judge(config)
            lines, failed = [*_lines(verdict, config)], False
            if options.try_reward:
                tried, failed = try_reward(config, verdict, rows=options.rows, answers=options.answers)
                lines += tried
        finally:
            HydraConfig.instance().cfg = None
    for kind, texts in (("error", verdict.errors), ("warning", verdict.warnings)):
        lines.append(f"{len(texts)} {kind}{'' if len(texts) == 1 else 's'}")
        lines += [f"  - {text}" for text in texts]
    return lines, failed or bool(verdict.errors)


def _lines(verdict: Verdict, config: Any) -> Iterator[str]:
    """Lines about the run as it will be."""
    rewards, chain = verdict.settings.rewards, verdict.chain
    steps = () if chain is None else chain.steps
    yield f"estimator  {verdict.name}"
    if steps:
        names = (f"{step.name} over {step.over}" if hasattr(step, "over") else step.name for step in steps)
        yield f"steps      {', '.join(names)}"
    conditions = {
        key: f" where {needed.on} is at least {needed.at_least:g}"
        for step in steps
        for key, needed in getattr(step, "conditions", {}).items()
    }
    keys = rewards.keys or ()
    weights = dict(zip(keys, rewards.weights or [1.0] * len(keys), strict=True))
    named = [f"{weights[key]:g} {key}{conditions.get(key, '')}" for key in keys]
    only = "" if verdict.name in ESTIMATORS else f" (only logged: verl's {verdict.name} uses the score)"
    yield f"rewards    {', '.join(named) + only if named else 'the score'}"
    if chain is not None and chain.needs_accuracy:
        bound = rewards.accuracy_threshold
        by_default = "" if rewards.accuracy_key else ", or `acc` if the reward function returns it"
        key = accuracy_of(verdict.settings)
        yield f"accuracy   {key}{by_default if key == 'score' else ''}{'' if bound is None else f' above {bound:g}'}"
    loss = [f"{name}={select(config, f'{ACTOR}.{name}')}" for name in ("loss_agg_mode", "loss_scale_factor")]
    yield f"loss       {select(config, f'{ACTOR}.policy_loss.loss_mode')}, {', '.join(loss)}"
    if verdict.filter and rewards.accuracy_between:
        yield "left out   groups whose mean accuracy is not between {:g} and {:g}".format(*rewards.accuracy_between)
    if rewards.keys and not verdict.errors and components(config) is None:
        yield f"untried    whether {select(config, f'{FUNCTION}.path') or 'the reward function'} returns these rewards"
