"""What is wrong with a configuration, said before Ray starts and again when the trainer is built."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf

from verl_ext.errors import ConfigurationError, unknown
from verl_ext.estimators import ESTIMATORS, build
from verl_ext.integration import hooks
from verl_ext.integration.attach import estimator_name
from verl_ext.integration.config import read_settings, select
from verl_ext.integration.overwritten import preset_conflicts
from verl_ext.integration.rewards import wrong_arguments
from verl_ext.integration.rules import ERRORS, WARNINGS, Given, filter_by_reward
from verl_ext.settings import SECTIONS, VERL_NAMES, DgpoSettings, Settings

logger = logging.getLogger("verl_ext")

# A setting of verl's configuration with a value, which is how messages write what to add.
_OVERRIDE = re.compile(r"(?<![\w.+])(?:algorithm|actor_rollout_ref|data|reward|trainer)(?:\.\w+)+(?==)")


def check_run(config: Any, *, unregistered: bool = False) -> None:
    """Raise one error that lists all that is wrong with a run's configuration; log what is only doubtful.

    An estimator of verl's or of the user's is never refused for what its configuration holds. In the driver, and before
    the trainer is built, its name may be `unregistered` still: then it is refused only if it looks misspelt.
    """
    name = estimator_name(config)
    errors = list(_unknown_estimator(name, unregistered=unregistered))
    misspelt = list(_misspelt(config))
    errors += [*(misspelt if name in ESTIMATORS else ()), *wrong_arguments(config)]
    errors += preset_conflicts(config)
    settings = None
    try:
        settings = read_settings(config.algorithm)
    except ConfigurationError as error:
        if name in ESTIMATORS:
            errors.append(str(error))
        else:
            logger.warning("not read, since algorithm.adv_estimator=%s is not verl_ext's: %s", name, error)
    chain = None
    if settings is not None and name in ESTIMATORS:
        hooks.require()
        try:
            chain = build(name, settings)
        except ConfigurationError as error:
            errors.append(str(error))
            # The steps without what stands in their way, for the rules to go on with; a list of the user's has none.
            if name != "compose":
                chain = build(name, replace(settings, norm_by_std=True, kl_in_reward=False, dgpo=DgpoSettings()))
    given = Given(name, settings or Settings(), chain, config)
    if settings is not None:
        errors += filter_by_reward(given)
    if chain is not None:
        errors += [text for rule in ERRORS for text in rule(given)]
    if errors:
        lines = "".join(f"\n  - {as_overrides(text, config)}" for text in errors)
        raise ConfigurationError(f"algorithm.adv_estimator={name} cannot run as configured:{lines}")
    doubts = [] if name in ESTIMATORS else misspelt
    if settings is not None:
        doubts += [text for rule in WARNINGS for text in rule(given)]
    for text in doubts:
        logger.warning("%s", as_overrides(text, config))


def as_overrides(text: str, config: Any) -> str:
    """The settings that a message names, as the user would write them for Hydra.

    One that the configuration does not have takes a leading `+`; the rewards have verl's own names where the user
    wrote these.
    """
    for ours, theirs in VERL_NAMES.items():
        if theirs not in text and select(config, f"algorithm.{theirs}") is not None:
            text = re.sub(rf"\balgorithm\.rewards\.{ours}\b", f"algorithm.{theirs}", text)
    return _OVERRIDE.sub(lambda found: found[0] if _has(config, found[0]) else f"+{found[0]}", text)


def _has(config: Any, path: str) -> bool:
    parent, _, name = path.rpartition(".")
    section = select(config, parent)
    return OmegaConf.is_dict(section) and name in section


def _misspelt(config: Any) -> Iterator[str]:
    """Entries of `algorithm` which neither verl nor this package knows and which look like one of ours."""
    from verl.trainer.config import AlgoConfig

    homes = {item.name: name for name, kind in SECTIONS.items() for item in dataclasses.fields(kind)}
    ours = {name: f"algorithm.{name}" for name in (*SECTIONS, *VERL_NAMES.values())}
    ours = {name: f"algorithm.{home}.{name}" for name, home in homes.items()} | ours
    known = {item.name for item in dataclasses.fields(AlgoConfig)} | set(SECTIONS) | set(VERL_NAMES.values())
    for key in map(str, config.algorithm):
        near = difflib.get_close_matches(key, ours, n=1, cutoff=0.75) if key not in known else []
        if near:
            yield f"algorithm.{key} is unknown and would be ignored: did you mean {ours[near[0]]}?"


def check_registered(config: Any) -> None:
    """Refuse an estimator that nobody has registered by the time the trainer is built."""
    for text in _unknown_estimator(estimator_name(config), unregistered=False):
        raise ConfigurationError(text)


def _unknown_estimator(name: str, *, unregistered: bool) -> Iterator[str]:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    near = difflib.get_close_matches(name.casefold(), ADV_ESTIMATOR_REGISTRY, n=1, cutoff=0.75)
    if unregistered and name not in ADV_ESTIMATOR_REGISTRY and not near and name != "None":
        logger.warning("algorithm.adv_estimator=%s is not registered yet: the trainer's process must register it", name)
    elif name not in ADV_ESTIMATOR_REGISTRY:
        yield (
            f"algorithm.adv_estimator: {unknown('estimator', name, ADV_ESTIMATOR_REGISTRY)}; one of your own must be "
            "registered in every process, by VERL_USE_EXTERNAL_MODULES or a verl.plugins entry point"
        )
