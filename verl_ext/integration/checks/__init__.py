"""Check the configuration of a run, before Ray starts and when the trainer is built."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import OmegaConf

from verl_ext.errors import Complaint, ConfigurationError
from verl_ext.estimators import build
from verl_ext.integration import hooks
from verl_ext.integration.checks import rules
from verl_ext.integration.checks.describe import describe
from verl_ext.integration.checks.read import RunConfig, estimator_name, read_settings
from verl_ext.integration.checks.rewards import dropped
from verl_ext.registry import INSTALLED, changed
from verl_ext.settings import Settings

logger = logging.getLogger("verl_ext")


@dataclass(frozen=True)
class Verdict(RunConfig):
    """The configuration of a run, and what the rules have against it."""

    errors: tuple[str, ...]
    warnings: tuple[str, ...]


def check_run(config: Any, main: str | None = None) -> Verdict | None:
    """Judge a configuration; raise one error that lists all errors. `main`: the source of what begins the run.

    None for a configuration without a section `algorithm`: estimators of this package do not compute for it.
    """
    if not (OmegaConf.is_dict(config) and OmegaConf.is_dict(config.get("algorithm"))):
        return None
    verdict, lost = judge(config), [] if main is None else [*dropped(config, [main])]
    if errors := [*verdict.errors, *(lost if verdict.ours else ())]:
        lines = "".join(f"\n  - {text}" for text in errors)
        raise ConfigurationError(f"algorithm.adv_estimator={verdict.name} cannot run as configured:{lines}")
    for text in lost:
        logger.warning("%s", text)
    return verdict


def log_run(verdict: Verdict) -> None:
    """Begin the log of a training: what it does, as `check` prints it, and the warnings."""
    if verdict.ours:
        logger.info("%s", "\n".join(["this training:", *describe(verdict)]))
    for text in verdict.warnings:
        logger.warning("%s", text)


def judge(config: Any) -> Verdict:
    """Collect the errors and warnings about a configuration."""
    name = estimator_name(config)
    if name in INSTALLED:
        hooks.require()
    run, judging = RunConfig(name, Settings(), None, config), rules.ALWAYS
    complaints: list[Complaint] = []
    try:
        run = replace(run, settings=read_settings(config))
        changed(run.settings)
        judging += rules.READ
        run = replace(run, chain=build(name, run.settings) if name in INSTALLED else None)
    except ConfigurationError as error:
        # Of a run without this package only verl's entries are read, in which verl may take other values.
        complaints.append(Complaint(str(error), fatal=run.ours))
    for judged in (*(rule(run) for rule in judging), *(rule(config) for rule in hooks.RULES)):
        try:
            complaints.extend(judged)
        except ConfigurationError as error:  # an entry that the rule cannot read
            complaints.append(Complaint(str(error)))
    texts = dict.fromkeys(complaints)
    errors = tuple(text for text, fatal in texts if fatal)
    return Verdict(**vars(run), errors=errors, warnings=tuple(text for text, fatal in texts if not fatal))
