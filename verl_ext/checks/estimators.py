"""Rules about the estimator of a run: its name, its settings, and the settings of verl that it cannot follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

from verl_ext.checks.presets import other_estimator
from verl_ext.checks.unread import KL_IN_LOSS, KL_IN_REWARD
from verl_ext.errors import Finding, listed, nearest
from verl_ext.methods.drgrpo import DrgrpoSettings
from verl_ext.registry import (
    ADDED_ESTIMATORS,
    ENTRY_POINT_GROUP,
    ENTRY_POINTS,
    RESERVED_NAMES,
    changed_sections,
    load,
    misspelled_settings,
)
from verl_ext.run import Run
from verl_ext.run_config import FUNCTION, is_verl_function, registered, sections_in_use
from verl_ext.settings import ACCURACY_BETWEEN, ANY_REWARD, RewardsSettings, VerlExtSettings

NO_BASELINE = "the advantage is the score without a baseline"
WITH_ONE_RESPONSE: Mapping[str, str] = {
    "grpo": NO_BASELINE,
    "grpo_vectorized": NO_BASELINE,
    "rloo": NO_BASELINE,
    "opo": NO_BASELINE,
    "gpg": NO_BASELINE,
    "optimal_token_baseline": NO_BASELINE,
    "tir_optimal_token_baseline": NO_BASELINE,
    "reinforce_plus_plus_baseline": "the only baseline is the mean of the batch",
    "rloo_vectorized": "every advantage is 0",
    "grpo_passk": "verl raises an error after the first rollout",
}
"""What happens with `rollout.n=1`, by the name of verl's estimator."""


def reserved_name(run: Run) -> Iterator[Finding]:
    """Report an entry point of another package that is ignored, because its name is the one of another estimator."""
    if run.name not in RESERVED_NAMES or run.name not in ENTRY_POINTS:
        return
    yield Finding(
        "error" if run.computes_advantages else "warning",
        f"The entry point {run.name}={ENTRY_POINTS[run.name].value} is ignored, because another estimator already has "
        f"the name {run.name}. That estimator would compute the advantages.",
        "Rename the entry point in its package, or uninstall the package.",
    )


def unknown_estimator(run: Run) -> Iterator[Finding]:
    """Warn about a name that is not registered in this process. The trainer's process may register it later."""
    known = {str(name) for name in (*registered(), *ADDED_ESTIMATORS)}
    if run.name in known:
        return
    near = nearest(run.name, known)
    valid = f"to one of {listed(known)}" if near is None else f"to {near!r}, or to another of {listed(known)}"
    yield Finding(
        "warning",
        f"algorithm.adv_estimator={run.name!r} is not the name of an estimator that is registered here.",
        f"Set algorithm.adv_estimator {valid}. A custom estimator must be registered in the trainer's process, by "
        f"a module in VERL_USE_EXTERNAL_MODULES or by an entry point in the group {ENTRY_POINT_GROUP}.",
    )


def misplaced_settings(run: Run) -> Iterator[Finding]:
    """Report settings of verl_ext that nothing reads, because they are misspelled or at the top level."""
    from verl.trainer.config import AlgoConfig

    yield from misspelled_settings(run.config.algorithm, known={field.name for field in dataclasses.fields(AlgoConfig)})
    for section in sections_in_use(run.config):
        yield Finding(
            "error",
            f"The section {section} is at the top level of the configuration, where neither verl nor verl_ext reads "
            "it.",
            f"Use algorithm.{section} instead of {section}.",
        )


def missing_keys(run: Run) -> Iterator[Finding]:
    """Report an estimator that works on each reward separately, if the rewards have no names."""
    if run.chain is not None and run.chain.per_reward and run.settings.rewards.keys is None:
        source = run.select(f"{FUNCTION}.path") or "the reward function"
        yield Finding(
            "error",
            f"{run.name} works on each reward separately, but algorithm.rewards.keys is not set.",
            f"Set '++algorithm.rewards.keys=[...]' to the names of the rewards that {source} returns in addition to "
            "`score`.",
        )


def section_of_other_estimator(run: Run) -> Iterator[Finding]:
    """Warn about the settings of an estimator that the run does not use."""
    for section in sorted(changed_sections(run.settings).keys() - {*run.methods}):
        yield Finding(
            "warning",
            f"algorithm.{section} is set, but algorithm.adv_estimator={run.name} does not use it.",
            f"Remove algorithm.{section}, or {other_estimator(run, section)}.",
        )


def without_effect_on_verl(run: Run) -> Iterator[Finding]:
    """Report settings that have no effect on an estimator of verl."""
    if run.computes_advantages:
        return
    rewards, defaults = run.settings.rewards, RewardsSettings()
    severities: dict[str, Literal["error", "warning"]] = {
        "weights": "warning",
        "rejected": "warning",
        "conditions": "error",
    }
    for setting, severity in severities.items():
        if getattr(rewards, setting) != getattr(defaults, setting):
            yield Finding(
                severity,
                f"algorithm.rewards.{setting} has no effect on verl's {run.name}, which reads only the score.",
                f"Remove algorithm.rewards.{setting}, or select an estimator of verl_ext. For example, "
                f"{other_estimator(run, 'weighted_grpo')}.",
            )
    dump_dir = run.settings.verl_ext.dump_dir
    if dump_dir is not None and rewards.keys is None:
        yield Finding(
            "warning",
            f"algorithm.verl_ext.dump_dir={dump_dir} has no effect on verl's {run.name} while algorithm.rewards.keys "
            "is not set.",
            "Set '++algorithm.rewards.keys=[...]' to the names of the rewards, or remove algorithm.verl_ext.dump_dir.",
        )


def experimental_trainer(run: Run) -> Iterator[Finding]:
    """Reject verl's experimental trainers, which do not call verl_ext.

    Only their configurations have a section `rollout`.
    """
    settings = run.settings
    are_set = settings.rewards != RewardsSettings() or settings.verl_ext != VerlExtSettings()
    filters_groups = run.filter_metric in (ANY_REWARD, ACCURACY_BETWEEN)
    if run.select("rollout") is not None and (run.computes_advantages or are_set or filters_groups):
        yield Finding(
            "error",
            "The section `rollout` belongs to verl's experimental trainers, which do not call verl_ext. The estimators "
            f"of verl_ext (algorithm.adv_estimator={run.name}), algorithm.rewards, algorithm.verl_ext and the filters "
            "of verl_ext cannot be used there.",
            "Start verl.trainer.main_ppo with trainer.v1.trainer_mode=separate_async instead.",
        )


def single_response(run: Run) -> Iterator[Finding]:
    """Report groups of one response, which is verl's default: there is no signal, or no baseline."""
    setting = "actor_rollout_ref.rollout.n"
    if run.select(setting) != 1:
        return
    steps = () if run.chain is None else run.chain.steps
    if any(step.centers or step.compares or step.zero_without_variance for step in steps):
        yield Finding(
            "error",
            f"{setting}=1 gives one response per prompt, but {run.name} compares the responses to a prompt. Every "
            "advantage would be 0.",
            f"Set {setting}=8, for example.",
        )
        return
    is_of_verl = is_verl_function(registered().get(run.name))
    if run.name in WITH_ONE_RESPONSE and is_of_verl and not run.select("distillation.enabled"):
        effect = WITH_ONE_RESPONSE[run.name]
        yield Finding("warning", f"With {setting}=1 and verl's {run.name}, {effect}.", f"Set {setting}=8, for example.")


def why_not_kl_in_reward(run: Run) -> str | None:
    """Return why the steps cannot follow `use_kl_in_reward=True`, as a sentence; None if they can."""
    if run.chain is None:
        return None
    if run.chain.per_reward:
        return f"{run.name} works on each reward separately, but verl adds the KL term to one combined reward."
    if any(step.needs_nonnegative for step in run.chain.steps):
        return f"{run.name} needs rewards of at least 0, but the KL term can make them negative."
    if run.settings.rewards.per_turn:
        return "algorithm.rewards.per_turn gives each turn a reward, but verl adds the KL term to whole responses."
    if not any(step.adds_kl for step in run.chain.steps):
        return f"{run.name} sums the rewards without the step weighted_sum, which is the step that adds the KL term."
    return None


def kl_in_loss(run: Run) -> str:
    """Return the lines that add a KL term to the loss; empty if the estimator trains without one."""
    if "drgrpo" in run.methods and run.settings.of("drgrpo", DrgrpoSettings).check_loss:
        return ""
    if run.settings.verl_ext.skip_zero_advantage:  # which is rejected with a KL term in the loss
        return f"{KL_IN_LOSS}=True algorithm.verl_ext.skip_zero_advantage=False"
    return f"{KL_IN_LOSS}=True"


def kl_in_reward(run: Run) -> Iterator[Finding]:
    """Reject KL in the reward if the steps cannot follow it."""
    why = why_not_kl_in_reward(run)
    if not run.settings.kl_in_reward or why is None:
        return
    fix = f"Set {KL_IN_REWARD}=False."
    in_loss = kl_in_loss(run)
    if in_loss:
        fix += f" To keep a KL term, also set {in_loss}."
    yield Finding("error", f"{KL_IN_REWARD}=True does not work with {run.name}. {why}", fix)


def division_by_std(run: Run) -> Iterator[Finding]:
    """Reject a step that divides by the standard deviation if verl's setting says that nothing divides by it."""
    if run.chain is None or run.settings.norm_by_std:
        return
    for step in run.chain.steps:
        if step.divides_by_std:
            yield Finding(
                "error",
                f"algorithm.norm_adv_by_std_in_grpo=False contradicts the step {step.name} of {run.name}, which "
                "divides by the scale of the rewards.",
                f"Remove algorithm.norm_adv_by_std_in_grpo=False, or {_without_division(run, step.name)}.",
            )


def _without_division(run: Run, step: str) -> str:
    """Say how an estimator is used without its division by the scale of the rewards."""
    changes = {
        "gdpo": "set ++algorithm.gdpo.scale=none",
        "dgpo": "set ++algorithm.dgpo.dgae=False",
        "compose": f"remove {step} from algorithm.compose.steps",
    }
    for name in changes:
        if name in run.methods:
            return changes[name]
    return other_estimator(run, "weighted_grpo")


def rule_of_method(run: Run) -> Iterator[Finding]:
    """Apply the rules that the methods of the run declare."""
    for name in run.methods if run.chain is not None else ():
        yield from load(name).rule(run.settings, run.select)
