"""Check a run's configuration before Ray starts, and again when the trainer is built."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from verl_ext.core.chain import Chain
from verl_ext.errors import ConfigurationError, listed, nearest
from verl_ext.estimators import ESTIMATORS, build
from verl_ext.integration import hooks
from verl_ext.integration.config.preset_conflicts import misplaced, misspelt_group, preset_conflicts
from verl_ext.integration.config.read import (
    common_settings,
    estimator_name,
    has,
    misspelt,
    read_settings,
    select,
    unreadable,
)
from verl_ext.integration.config.resume import wrong_ranks
from verl_ext.integration.config.reward_arguments import wrong_accuracy, wrong_arguments, wrong_components
from verl_ext.integration.config.rules import ERRORS, NOTES, WARNINGS, filter_by_reward
from verl_ext.integration.config.run_config import RunConfig
from verl_ext.integration.config.verl_settings import wrong_types, wrong_variables
from verl_ext.settings import VERL_NAMES, Settings

logger = logging.getLogger("verl_ext")

# `setting=value` in a message.
_OVERRIDE = re.compile(r"(?<![\w.+])(?:algorithm|actor_rollout_ref|data|reward|trainer)(?:\.\w+)+(?==)")


@dataclass(frozen=True)
class Verdict:
    """The result of checking a run's configuration."""

    name: str
    """The estimator."""
    settings: Settings | None
    """None if they cannot be read."""
    chain: Chain | None
    """The estimator's steps; None if it is not ours, or they cannot be built."""
    errors: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What `auto` chose, and why."""


def check_run(config: Any, *, unregistered: bool = False) -> None:
    """Raise one error that lists everything wrong with a run's configuration; log the warnings and notes."""
    verdict = judge(config, unregistered=unregistered)
    if verdict.errors:
        lines = "".join(f"\n  - {text}" for text in verdict.errors)
        raise ConfigurationError(f"algorithm.adv_estimator={verdict.name} cannot run as configured:{lines}")
    for text in verdict.warnings:
        logger.warning("%s", text)
    for text in verdict.notes:
        logger.info("%s", text)


def judge(config: Any, *, unregistered: bool = False) -> Verdict:
    """Collect the errors, warnings and notes about a configuration.

    With an estimator that is not ours, only what is certain to end the run, or a conflict with our presets, is an
    error. With `unregistered`, as in the driver and before the trainer is built, an estimator that is not registered is
    an error only if its name looks misspelt.
    """
    name = estimator_name(config)
    ours = name in ESTIMATORS
    errors, warnings = _estimator(config, unregistered=unregistered)

    def collect(complaints: Iterable[str], into: list[str] = errors) -> None:
        try:
            into.extend(complaints)
        except ConfigurationError as error:  # an entry that a rule cannot read
            errors.append(str(error))

    for look in (wrong_arguments, preset_conflicts, misspelt_group, wrong_variables):
        collect(look(config))
    for look in (misspelt_of, misplaced, wrong_types, wrong_ranks):
        collect(look(config), errors if ours else warnings)
    settings = None
    try:
        settings = read_settings(config.algorithm)
    except ConfigurationError:
        complaints = unreadable(config.algorithm)
        if ours:
            errors += complaints
        else:
            lost = "" if common_settings(config) else ", and no rewards are logged or dumped"
            warnings += [f"{text}; verl's {name} runs without this entry{lost}" for text in complaints]
    chain = _chain(name, settings, errors) if settings is not None and ours else None
    run = RunConfig(name, settings or Settings(), chain, config)
    if settings is not None:
        collect(wrong_components(config, settings))
        collect(filter_by_reward(run))
        for rule in WARNINGS:
            collect(rule(run), warnings)
    if settings is not None and chain is not None and chain.needs_accuracy:
        collect(wrong_accuracy(config, settings))
    for rule in ERRORS if chain is not None else ():
        collect(rule(run))
    notes = [text for rule in NOTES for text in rule(run)]
    return Verdict(name, settings, chain, *(_written(texts, config) for texts in (errors, warnings, notes)))


def _chain(name: str, settings: Settings, errors: list[str]) -> Chain | None:
    """The estimator's steps, for the rules; if they cannot be built, try without the settings that prevent it."""
    hooks.require()
    attempts = [settings]
    if name != "compose":  # there the user's list decides
        attempts.append(replace(settings, norm_by_std=True, kl_in_reward=False))
    for attempt in attempts:
        try:
            return build(name, attempt)
        except ConfigurationError as error:
            errors.append(str(error))
    return None


def _written(texts: Iterable[str], config: Any) -> tuple[str, ...]:
    """Messages without duplicates, with their settings as the user would write them."""
    return tuple(dict.fromkeys(as_overrides(text, config) for text in texts))


def as_overrides(text: str, config: Any) -> str:
    """A message with its settings as the user would write them for Hydra.

    A setting that the configuration lacks gets a leading `+`. If the user wrote verl's own names of the rewards, the
    message uses them too.
    """
    for ours, theirs in VERL_NAMES.items():
        if theirs not in text and _is_set(config, f"algorithm.{theirs}"):
            text = re.sub(rf"\balgorithm\.rewards\.{ours}\b", f"algorithm.{theirs}", text)
    return _OVERRIDE.sub(lambda match: match[0] if has(config, match[0]) else f"+{match[0]}", text)


def _is_set(config: Any, path: str) -> bool:
    try:
        return select(config, path) is not None
    except ConfigurationError:  # it is set, but cannot be read
        return True


def misspelt_of(config: Any) -> Iterator[str]:
    """Messages for unknown entries of `algorithm` that look like one of ours."""
    from verl.trainer.config import AlgoConfig

    return misspelt(config.algorithm, known={item.name for item in dataclasses.fields(AlgoConfig)})


def check_registered(config: Any) -> None:
    """Raise unless the estimator is registered; called when the trainer is built."""
    errors, _ = _estimator(config, unregistered=False)
    for text in errors:
        raise ConfigurationError(text)


def _estimator(config: Any, *, unregistered: bool) -> tuple[list[str], list[str]]:
    """Errors and warnings about the estimator's name."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    value, name = config.algorithm.adv_estimator, estimator_name(config)
    if isinstance(value, str | Enum) and name in ADV_ESTIMATOR_REGISTRY:
        return [], []
    near = nearest(name, ADV_ESTIMATOR_REGISTRY, cutoff=0.75)
    if unregistered and isinstance(value, str) and value and near is None:
        text = f"algorithm.adv_estimator={name} is not registered yet: the trainer's process must register it"
        return [], [text]
    hint = f" (did you mean {near!r}?)" if near is not None else ""
    text = (
        f"algorithm.adv_estimator: unknown estimator {name!r}{hint}; valid: {listed(ADV_ESTIMATOR_REGISTRY)}; one of "
        "your own must be registered in every process, by VERL_USE_EXTERNAL_MODULES or a verl.plugins entry point"
    )
    return [text], []
