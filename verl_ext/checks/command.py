"""`verl-ext check`: validate the configuration of a run before it starts.

The configuration is composed as by `python -m verl.trainer.main_ppo`, with the same command line and presets. Neither
Ray nor a model is started. The exit status is 1 if verl_ext or verl rejects the run.
"""

from __future__ import annotations

import argparse
import inspect
import io
import math
import re
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
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
from verl_ext.checks.try_reward import try_reward
from verl_ext.errors import ConfigurationError, Finding, VerlExtError, nearest, reading
from verl_ext.files import say
from verl_ext.registry import entries_read
from verl_ext.run import Run
from verl_ext.run_config import FUNCTION, has_algorithm, select

VERL = "verl.trainer.config"
"""The module with the configurations of verl's entry point."""
SEVERITIES = ("error", "warning", "note")
MOST_ERRORS = 8
"""The number of errors of the reward function that are printed."""


def check(options: argparse.Namespace, *, until: float | None = None) -> int:
    """Print what the run will do and what is wrong with its configuration; return 1 if the run is rejected.

    `until` is the time by `time.monotonic()` at which the calls of the reward function end. A rehearsal, which starts
    verl's own main program, gives it.
    """
    with composed(options) as config:
        run = judge(config)
        mains = mains_of_file() if until is None else ()
        lines = [*describe(run)]
        findings = [*run.findings, *dropped(config, mains), *_findings_of_verl(config)]
        planned, found = _planned(run)
        lines += planned
        findings += found
        if options.try_reward:
            tried, found = _tried(config, run, options, until)
            lines += tried
            findings += found
        elif run.settings.rewards.keys and not run.errors and known_components(config) is None:
            function = select(config, f"{FUNCTION}.path") or "the reward function"
            lines.append(f"not called {function} (add --try-reward to verify that it returns these rewards)")
        appended = r"^(\+{1,2})(?!.*kwargs)([\w.]+)\.(\w+)="
        unknown_settings = _unknown_settings(appended, options.overrides, str(HydraConfig.get().job.config_name))
        findings += [Finding("warning", text, fix) for text, fix in unknown_settings]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    counts = [sum(finding.severity == severity for finding in findings) for severity in SEVERITIES]
    rejected = "rejected" if counts[0] else "rejected by --strict" if options.strict and any(counts) else ""
    lines += [f"{finding.severity}: {finding}" for finding in findings]
    totals = [
        f"{count} {severity}{'' if count == 1 else 's'}" for severity, count in zip(SEVERITIES, counts, strict=True)
    ]
    say("\n".join([*lines, f"{rejected or 'accepted'}: {', '.join(totals)}"]))
    return int(bool(rejected))


def _findings_of_verl(config: Any) -> list[Finding]:
    """Return what verl's own check, which runs before Ray starts, reports."""
    try:
        _ask_verl(config)
    except Exception as error:  # noqa: BLE001 - its errors are of many kinds
        text = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(". :")
        functions = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
        # A package is not installed, or a file or the network cannot be reached.
        cannot_run = isinstance(error, ImportError | OSError) or "<module>" in functions
        if cannot_run:
            return [
                Finding(
                    "warning",
                    f"verl's own check of the configuration cannot run on this machine ({text}).",
                    "Run `verl-ext check` in the environment of the training.",
                )
            ]
        fix = "Change the settings that this message names."
        return [Finding("error", f"verl rejects the configuration ({text}).", fix)]
    return []


def _planned(run: Run) -> tuple[list[str], list[Finding]]:
    """Return what the run will do, or the error that prevents the plan."""
    try:
        with reading("The plan of the run", ConfigurationError, "computed", "Check the sections trainer and data."):
            return plan(run)
    except ConfigurationError as error:
        return [], [Finding("error", str(error), "")]


def _tried(config: Any, run: Run, options: argparse.Namespace, until: float | None) -> tuple[list[str], list[Finding]]:
    """Call the reward function; return a summary and the findings, of many similar errors the first few."""
    try:
        lines, findings = try_reward(config, run, options, math.inf if until is None else until)
    except VerlExtError as error:  # the function cannot be called at all
        return [], [Finding("error", str(error), "")]
    errors = [finding for finding in findings if finding.severity == "error"]
    others = [finding for finding in findings if finding.severity != "error"]
    hidden = len(errors) - MOST_ERRORS
    if hidden > 0:
        text = f"Calling the reward function raised {len(errors)} errors in total, of which {MOST_ERRORS} are shown."
        errors = [*errors[:MOST_ERRORS], Finding("error", text, "")]
    return lines, errors + others


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
                    message = r"Could not override '()([\w.]+)\.(\w+)'"
                    for text, fix in _unknown_settings(message, [str(error)], name):
                        raise ConfigurationError(f"{text} {fix}") from error
                    if missing := re.search(r"Could not override '([\w.]+\.\w+)'", str(error)):
                        raise _without_plus(missing[1], options.overrides, name) from error
                    raise
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


def _without_plus(path: str, overrides: Sequence[str], name: str) -> ConfigurationError:
    """Return the error for a setting that Hydra cannot override, because the configuration does not have it."""
    given = next((text for text in overrides if text.startswith(f"{path}=")), f"{path}=VALUE")
    fix = f"Set '++{given}'"
    if path.startswith(tuple(f"algorithm.{section}" for section in entries_read())):
        fix += ", or select an estimator by its preset, which adds these settings, for example +verl_ext=gdpo"
    return ConfigurationError(
        f"{path} cannot be set without a plus sign, because the configuration {name} has no such setting. {fix}."
    )


def _unknown_settings(pattern: str, texts: Iterable[str], name: str) -> Iterator[tuple[str, str]]:
    """Yield each setting of the texts that neither this verl nor verl_ext has, although its section exists.

    The pattern finds the pluses, the section and the last name of a setting. Each result is what is wrong, and the fix.
    """
    import verl

    for plus, section, setting in re.findall(pattern, "\n".join(texts), re.M):
        known = select(hydra.compose(name), section) or ()
        if section.removeprefix("algorithm.") in entries_read() or (plus and not known):
            continue
        files = (file for kind in ("py", "yaml") for file in Path(verl.__file__).parent.rglob(f"*.{kind}"))
        if not any(re.search(rf"\b{setting}\b", file.read_text("utf-8")) for file in files):
            near = nearest(setting, map(str, known), cutoff=0.85)
            path = f"{plus}{section}.{setting}"
            fix = f"Remove {path}" if near is None else f"Use {section}.{near} instead"
            fix += ", or keep it only if your own code reads it." if plus else "."
            yield f"verl {verl.__version__} has no setting {path}.", fix


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
