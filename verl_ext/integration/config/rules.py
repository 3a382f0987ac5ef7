"""The rules for a run's configuration: errors, warnings and notes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from omegaconf import DictConfig

from verl_ext.errors import listed, nearest, unknown
from verl_ext.estimators import ESTIMATORS, build
from verl_ext.estimators.compose import try_out
from verl_ext.estimators.gdpo import GdpoSettings, whitening_of
from verl_ext.integration.config import loss_rules
from verl_ext.integration.config.idle import idle_accuracy, idle_groups, idle_history, idle_settings, idle_weights
from verl_ext.integration.config.run_config import RunConfig
from verl_ext.settings import ANY_REWARD


def _missing_keys(run: RunConfig) -> Iterator[str]:
    if run.settings.rewards.keys is None and run.per_reward:
        path = run.select("reward.custom_reward_function.path")
        source = f"the reward function in {path}" if path else "your reward function (verl's own return `acc` at most)"
        yield (
            f"{run.name} normalises each reward separately and needs their names: set 'algorithm.rewards.keys=[...]' "
            f"(or 'algorithm.gdpo_reward_keys=[...]') to the keys that {source} returns beside `score`"
        )


def _no_weight(run: RunConfig) -> Iterator[str]:
    weights = run.settings.rewards.weights
    if weights is not None and not any(weights):
        yield (
            f"algorithm.rewards.weights={list(weights)} are all 0, so every advantage would be 0: give at least one "
            "reward a weight, or remove algorithm.rewards.weights, which makes each 1"
        )


def _conditions(run: RunConfig) -> Iterator[str]:
    keys = run.settings.rewards.keys
    if keys is None or not run.per_reward:
        return
    for step in run.chain.steps if run.chain is not None else ():
        for key, needed in getattr(step, "conditions", {}).items():
            for name in (key, needed.on):
                if name not in keys:
                    where = "compose.steps: condition" if run.name == "compose" else "gdpo.conditions"
                    yield f"algorithm.{where}: {unknown('reward', name, keys)} (algorithm.rewards.keys)"


def _composed(run: RunConfig) -> Iterator[str]:
    if run.name == "compose" and run.chain is not None and not any((*_missing_keys(run), *_conditions(run))):
        complaint = try_out(partial(build, run.name), run.settings)
        if complaint:
            yield complaint


def _unused_settings(run: RunConfig) -> Iterator[str]:
    # A setting at its default may come from a preset and changes nothing.
    for section in sorted(run.settings.own.keys() - run.used):
        yield (
            f"algorithm.{section} is set, but algorithm.adv_estimator={run.name} does not use it: remove it, or "
            f"set algorithm.adv_estimator={section}"
        )
    if run.name in ESTIMATORS:
        return
    dumps, rewards = run.settings.verl_ext.dump_dir is not None, run.settings.rewards
    if dumps and run.select("algorithm.use_pf_ppo"):
        yield (
            "algorithm.verl_ext.dump_dir has no effect with algorithm.use_pf_ppo=True, which draws other rows for the "
            "update: remove one of them"
        )
    if dumps and rewards.keys is None:
        yield (
            f"algorithm.verl_ext.dump_dir has no effect on verl's {run.name} without named rewards: set "
            "'algorithm.rewards.keys=[...]', or remove it"
        )
    if rewards.weights is not None:
        yield (
            f"algorithm.rewards.weights has no effect on verl's {run.name}, which uses the score and only logs the "
            f"rewards: remove it, or set algorithm.adv_estimator to one of {listed(ESTIMATORS)}"
        )


def _filtering(run: RunConfig) -> str | None:
    """The metric by which groups are filtered, or None."""
    rule = run.select("algorithm.filter_groups")
    if not isinstance(rule, Mapping | DictConfig):  # verl's own check reports anything else
        return None
    return str(run.select("algorithm.filter_groups.metric")) if run.select("algorithm.filter_groups.enable") else None


def _filtered_groups(run: RunConfig) -> Iterator[str]:
    metric = _filtering(run)
    if metric == "reward" and run.per_reward:
        yield (
            "algorithm.filter_groups.metric=reward drops groups whose total does not vary although single rewards do, "
            f"which {run.name} learns from: set algorithm.filter_groups.metric={ANY_REWARD}, which keeps them"
        )
    if metric == ANY_REWARD and not run.per_reward:
        yield (
            f"algorithm.filter_groups.metric={ANY_REWARD} keeps groups whose rewards vary although their total does "
            f"not: {run.name}, which uses the total, learns nothing from them; set "
            "algorithm.filter_groups.metric=reward"
        )


def filter_by_reward(run: RunConfig) -> Iterator[str]:
    """Errors in the use of our filter of groups, which works with any estimator."""
    metric = _filtering(run)
    if metric != ANY_REWARD:
        if metric is not None and nearest(metric, [ANY_REWARD], cutoff=0.8) is not None:
            yield f"algorithm.filter_groups.metric={metric} is unknown: set algorithm.filter_groups.metric={ANY_REWARD}"
        return
    where = f"algorithm.filter_groups.metric={ANY_REWARD}"
    if run.settings.rewards.keys is None:
        yield f"{where} needs the names of the rewards: set 'algorithm.rewards.keys=[...]'"
    if run.select("trainer.use_v1") is False:
        yield f"{where} works on verl's default trainer: remove trainer.use_v1=False, or the filter"
    sampler = run.select("trainer.v1.sampler.custom_sampler.path")
    if sampler:
        yield (
            f"{where} is installed in verl's own replay buffers, and trainer.v1.sampler.custom_sampler.path={sampler} "
            "replaces them: remove one of the two"
        )


def _unwritable(run: RunConfig) -> Iterator[str]:
    """Folders of the run that cannot be made or written here. This tries each where it is or would be.

    The trainer, which may be on another machine, refuses them.
    """
    dump, home = run.settings.verl_ext.dump_dir, run.select("trainer.default_local_dir")
    every = run.select("trainer.save_freq")
    folders = []
    if dump is not None and (run.name in ESTIMATORS or run.settings.rewards.keys is not None):
        folders.append(("algorithm.verl_ext.dump_dir", dump, "algorithm.verl_ext.dump_dir=null to dump none"))
    if isinstance(home, str) and home and isinstance(every, int) and every > 0:
        folders.append(("trainer.default_local_dir", home, "trainer.save_freq=-1 to save no checkpoint"))
    for setting, folder, without in folders:
        there = next(path for path in (Path(folder), *Path(folder).parents) if os.path.lexists(path))
        try:
            with TemporaryDirectory(dir=there):
                pass
        except OSError as error:
            yield (
                f"{setting}={folder} cannot be written on this machine, because nothing can be made in {there}: "
                f"{error.strerror}; if the trainer runs here, set {setting}=... to another folder, or {without}"
            )


def _std_of_verl(run: RunConfig) -> Iterator[str]:
    settings = run.settings
    as_verl = "gdpo" in run.used and settings.verl_keys and settings.of(GdpoSettings).scale == "std"
    if as_verl and not settings.norm_by_std:
        yield (
            "algorithm.norm_adv_by_std_in_grpo=False: rewards are not divided by their std per group; verl's own gdpo "
            "ignores this setting and divides: set algorithm.norm_adv_by_std_in_grpo=True to keep verl's numbers"
        )


def _whitening(run: RunConfig) -> Iterator[str]:
    if "gdpo" not in run.used or run.settings.of(GdpoSettings).whiten != "auto":
        return
    if whitening_of(run.settings) == "token":
        yield (
            "algorithm.gdpo.whiten is token (auto), as in verl's own gdpo, because the rewards are named by verl's "
            "algorithm.gdpo_reward_keys; the paper uses algorithm.gdpo.whiten=sequence"
        )
    else:
        yield (
            "algorithm.gdpo.whiten is sequence (auto), as in the paper, because the rewards are named by "
            "algorithm.rewards.keys; verl's own gdpo uses algorithm.gdpo.whiten=token"
        )


ERRORS = (_missing_keys, _no_weight, _conditions, _composed, *loss_rules.ERRORS)
WARNINGS = (
    _unused_settings,
    idle_settings,
    idle_accuracy,
    idle_groups,
    idle_history,
    idle_weights,
    _std_of_verl,
    _filtered_groups,
    _unwritable,
    *loss_rules.WARNINGS,
)
NOTES = (_whitening,)
"""These are logged at start-up for information."""
