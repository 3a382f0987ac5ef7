"""The two lists of rules: for every run, and for runs that use verl_ext.

`judge` says which list judges which run. A rule is a function of a `Run` that yields a `Finding` for each problem. The
rules of this folder are in files by subject. Those of the faster update are in `verl_ext.update.rule`, and a method may
have a rule of its own in the file of its formula. No rule depends on another one: their order is only the order in
which findings of the same severity are printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from verl_ext.checks import estimators, filters, losses, on_cpu, presets, rewards, verl_settings
from verl_ext.checks.dry_run import dry_run
from verl_ext.errors import Finding
from verl_ext.run import Run
from verl_ext.update import rule as update


class Rule(NamedTuple):
    """A function that reports problems of a run, and when it applies."""

    find: Callable[[Run], Iterable[Finding]]
    needs_settings: bool = True
    """Whether the rule is skipped if the settings of verl_ext cannot be read."""
    for_training: bool = False
    """Whether the rule is about rollouts and updates, so that it is skipped for a run that only validates."""


FOR_EVERY_RUN = (
    Rule(estimators.reserved_name, needs_settings=False),
    Rule(estimators.unknown_estimator, needs_settings=False),
    Rule(presets.misspelled_group, needs_settings=False),
    Rule(on_cpu.needs_gpu, needs_settings=False),
    Rule(on_cpu.ignored_cluster, needs_settings=False),
)
"""Mistakes after which a run would not use verl_ext although it should, and the platform of verl_ext for CPUs."""
FOR_RUNS_OF_VERL_EXT = (
    Rule(estimators.misplaced_settings, needs_settings=False),
    Rule(verl_settings.settings_without_switch, needs_settings=False),
    Rule(verl_settings.arguments_of_manager, needs_settings=False),
    Rule(presets.conflicting_preset, needs_settings=False),
    Rule(presets.preset_after_settings, needs_settings=False),
    Rule(presets.replaced_preset, needs_settings=False),
    Rule(verl_settings.unused_pf_ppo, needs_settings=False, for_training=True),
    Rule(verl_settings.greedy_rollout, needs_settings=False, for_training=True),
    Rule(verl_settings.endless_warmup, needs_settings=False, for_training=True),
    Rule(verl_settings.validation_on_training_data, needs_settings=False, for_training=True),
    Rule(verl_settings.incomplete_checkpoint, needs_settings=False),
    Rule(verl_settings.short_micro_batch, needs_settings=False, for_training=True),
    Rule(verl_settings.indivisible_mini_batch, needs_settings=False, for_training=True),
    Rule(rewards.unknown_components),
    Rule(rewards.lost_penalty),
    Rule(rewards.unnamed_accuracy),
    Rule(rewards.accuracy_outside_range),
    Rule(filters.incomplete_filter),
    Rule(filters.bounds_without_filter),
    Rule(filters.filter_on_other_trainer),
    Rule(filters.filter_by_score),
    Rule(rewards.lists_of_verl_estimator),
    Rule(rewards.several_calls_per_turn),
    Rule(rewards.unreadable_turns),
    Rule(rewards.list_as_accuracy),
    Rule(rewards.list_as_filter),
    Rule(rewards.step_without_rubrics),
    Rule(rewards.negative_rewards),
    Rule(estimators.section_of_other_estimator),
    Rule(estimators.without_effect_on_verl),
    Rule(estimators.experimental_trainer),
    Rule(estimators.missing_keys),
    Rule(estimators.single_response, for_training=True),
    Rule(estimators.kl_in_reward),
    Rule(estimators.division_by_std),
    Rule(dry_run),
    Rule(estimators.rule_of_method),
    Rule(losses.balance_for_other_loss),
    Rule(losses.loss_against_drgrpo),
    Rule(losses.unknown_loss),
    Rule(update.faster_update),
    Rule(update.without_flash_attn),
)
"""Settings of verl and verl_ext that do not do what they seem to do, or that end a run after hours."""
