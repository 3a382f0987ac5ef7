"""`verl-ext check`: print every error and warning of a configuration, without a run.

The configuration is composed as by `python -m verl.trainer.main_ppo`, with the same command line and presets. Neither
Ray nor a model is started. The exit status is 1 if verl_ext or verl refuses the run.
"""

from __future__ import annotations

import argparse
import inspect
import io
import math
import re
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, InstantiationException
from omegaconf import open_dict

from verl_ext.checks.describe import describe
from verl_ext.checks.judge import judge
from verl_ext.checks.plan import plan
from verl_ext.checks.rewards import dropped, known_components, mains_of_file
from verl_ext.checks.try_reward import add_trial, try_reward
from verl_ext.errors import ConfigurationError, VerlExtError, nearest, reading
from verl_ext.files import say
from verl_ext.registry import entries
from verl_ext.run_config import FUNCTION, RunConfig, select

VERL = "verl.trainer.config"
"""The module with the configurations of verl's entry point."""


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of verl, so that a command line can be pasted."""
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="settings as on verl's command line")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the primary configuration: folder and name in one")
    parser.add_argument("--config-path", "-cp", type=Path, metavar="FOLDER", help=f"{VERL} by default")
    parser.add_argument("--config-name", "-cn", default="ppo_trainer", metavar="NAME", help="ppo_trainer by default")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_configuration(parser)
    parser.add_argument("--try-reward", action="store_true", help="call the reward function on rows of training data")
    parser.add_argument("--rows", type=int, default=8, help="how many, 8 by default")
    parser.add_argument("--strict", action="store_true", help="a warning, or a line to look at, refuses the run, too")
    add_trial(parser)


def check(options: argparse.Namespace, *, until: float | None = None) -> int:
    """Print what the run would do and be told; return 1 if it would be refused.

    `until`: main_ppo runs it next, in a rehearsal, for which this is the time to end by the clock.
    """
    with composed(options) as config:
        verdict = judge(config)
        lines, doubts = [*describe(verdict)], list[str]()
        errors = [*verdict.errors, *dropped(config, mains_of_file() if until is None else ())]
        try:
            _ask_verl(config)
        except Exception as error:  # noqa: BLE001 - its errors are of many kinds
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            frames = (frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__))
            if isinstance(error, ImportError | OSError) or "<module>" in frames:  # a package is missing, or a network
                doubts.append(f"verl's own check cannot run here: {text}")
            else:
                errors.append(f"verl refuses it: {text}")
        try:
            with reading("the plan of the run", ConfigurationError):
                planned, doubtful = plan(verdict)
            lines, doubts = [*lines, *planned], [*doubts, *doubtful]
        except ConfigurationError as error:
            errors.append(str(error))
        if options.try_reward:
            try:
                tried, problems = try_reward(config, verdict, options, math.inf if until is None else until)
            except VerlExtError as error:  # it cannot begin
                tried, problems = [], [str(error)]
            more = [f"{len(problems) - 8} more of such answers"] if problems[8:] else []
            lines, errors = [*lines, *tried], [*errors, *problems[:8], *more]
        elif verdict.settings.rewards.keys and not errors and known_components(config) is None:
            function = select(config, f"{FUNCTION}.path") or "the reward function"
            lines.append(f"untried    whether {function} returns these rewards: add --try-reward")
        appended = r"^(\+{1,2})(?!.*kwargs)([\w.]+)\.(\w+)="
        doubts += [*verdict.warnings, *_gone(appended, options.overrides, str(HydraConfig.get().job.config_name))]
        for kind, texts in (("error", errors), ("warning", doubts)):
            lines.append(f"{len(texts)} {kind}{'' if len(texts) == 1 else 's'}")
            lines += [f"  - {text}" for text in texts]
        doubts += [line for line in lines if line.startswith(("look ", "missing "))]
    end = "refused" if errors else "refused by --strict" if options.strict and doubts else "accepted"
    say("\n".join([*lines, f"this run is {end}"]))
    return int(end != "accepted")


@contextmanager
def composed(options: argparse.Namespace) -> Iterator[Any]:
    """Compose the configuration within Hydra's global state, as in `hydra.main`."""
    folder, name = options.config_path, options.config_name.removesuffix(".yaml")
    if options.config is not None:
        folder, name = options.config.parent, options.config.stem
    module: Any = hydra.initialize_config_module
    files: Any = hydra.initialize_config_dir
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl warns about engines that are not installed
        import verl  # loads our plugin, which stores the presets

        if folder is not None and not folder.is_dir():  # Hydra begins where verl's entry point is
            folder = Path(verl.__file__).parent / "trainer" / folder
        home = module(VERL, version_base=None) if folder is None else files(str(folder.resolve()), version_base=None)
        with home:
            with reading(name, ConfigurationError):
                try:
                    config = hydra.compose(name, overrides=options.overrides, return_hydra_config=True)
                except ConfigCompositionException as error:
                    for text in _gone(r"Could not override '()([\w.]+)\.(\w+)'", [str(error)], name):
                        raise ConfigurationError(text) from error
                    raise
            HydraConfig.instance().set_config(config)
            try:
                with open_dict(config):
                    del config["hydra"]
                if RunConfig.of(config) is None:
                    raise ConfigurationError(
                        f"{name} has no section `algorithm`: it is not a configuration of verl's PPO"
                    )
                yield config
            finally:
                HydraConfig.instance().cfg = None


def _gone(pattern: str, texts: Iterable[str], name: str) -> Iterator[str]:
    """Name the settings of these texts whose last name is nowhere in this verl, nor ours, though their section is."""
    import verl

    for plus, section, setting in re.findall(pattern, "\n".join(texts), re.M):
        known = select(hydra.compose(name), section) or ()
        if section.removeprefix("algorithm.") in entries() or (plus and not known):
            continue
        files = (file for kind in ("py", "yaml") for file in Path(verl.__file__).parent.rglob(f"*.{kind}"))
        if not any(re.search(rf"\b{setting}\b", file.read_text("utf-8")) for file in files):
            near = nearest(setting, map(str, known), cutoff=0.85)
            hint = "" if near is None else f" (did you mean {near}?)"
            path = f"{plus}{section}.{setting}"
            yield f"verl {verl.__version__} has no setting {path}{hint}: remove it; + is for what code of yours reads"


def _ask_verl(config: Any) -> None:
    """Raise what verl's own check, before Ray starts, has against the configuration."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.workers.config import HFModelConfig

    # The model's section loads a tokenizer and a configuration, which may be on a hub that is out of reach.
    with patch.object(HFModelConfig, "__post_init__", lambda _: None), redirect_stdout(io.StringIO()):
        try:
            inspect.unwrap(validate_config)(config, need_reference_policy(config), need_critic(config))
        except InstantiationException as error:
            raise error.__cause__ or error from error
