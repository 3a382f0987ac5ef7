"""Judge the configuration of a run by the rules, in the driver, in the trainer and in `check`.

A run uses verl_ext if `run_config.entries_in_use` finds an entry of verl_ext in its configuration. Which findings there
are depends on the run:

| source of the finding        | run that uses verl_ext | any other run                                       |
|------------------------------|------------------------|-----------------------------------------------------|
| section that cannot be read  | error                  | warning: another package may have such a section    |
| `FOR_EVERY_RUN`              | as the rule says       | as the rule says                                    |
| `FOR_RUNS_OF_VERL_EXT`       | as the rule says       | driver and trainer: nothing, `check`: warning       |

What verl's own check, the plan and the trial of `check` find has the same severity in any run.

What happens with a finding depends on the place. If an error is raised, the warnings are not logged.

| place                       | error                     | warning                                     |
|-----------------------------|---------------------------|---------------------------------------------|
| driver, before Ray starts   | raised, all errors in one | logged                                      |
| trainer, in its own process | raised, all errors in one | logged                                      |
| `check`                     | printed, exit status 1    | printed, exit status 1 only with `--strict` |

Notes come only from the plan and the trial of `check`, which treats them like warnings. Rules about the settings that
the user has written (`presets.written_settings`) need Hydra's composition, so they report nothing in the trainer.

A rule is a function of a `Run` that yields a `Finding` for each problem. The rules are in files by subject. Those of
the faster update are in `verl_ext.update.rule`, and a method may have a rule of its own in the file of its formula. No
rule depends on another one: their order is only the order in which findings of the same severity are printed.

Another main program than verl's, or a module in VERL_USE_EXTERNAL_MODULES of Ray's processes, may register an estimator
in the trainer's process alone, under a name of verl_ext. In such a run there are two exceptions. If it uses only the
name, the driver logs the errors as a warning, and the trainer decides. If it does not use verl_ext, the driver logs no
warnings.

The driver also reports the reward sections of older versions of verl (`verl_settings.old_sections`) in a run that uses
verl_ext. With verl's own main program, which does not read them, they are errors. With another main program, which may
read them, they are warnings. `check` takes the arguments of verl's main program, so there they are errors in any run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from verl_ext import hooks
from verl_ext.checks import estimators, filters, losses, on_cpu, presets, rewards, verl_settings
from verl_ext.checks.dry_run import dry_run
from verl_ext.checks.summary import describe
from verl_ext.errors import ConfigurationError, Finding
from verl_ext.registry import build, changed_sections
from verl_ext.run import Run
from verl_ext.run_config import ESTIMATOR, entries_in_use, estimator_name, has_algorithm, read_settings
from verl_ext.update import rule as update

logger = logging.getLogger("verl_ext")


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

NEEDED_HOOKS = ("verl.trainer.ppo.core_algos", "verl.utils.config", "verl.trainer.main_ppo")
"""What every estimator of verl_ext needs: verl's lookup of estimators, and the starts at which a run is checked."""
SUMMARY = "verl_ext: summary of this run"
"""The first line of the summary in the log of a training."""


def check_run(config: Any, more_findings: Iterable[Finding] = (), *, name_is_certain: bool = True) -> Run | None:
    """Judge a configuration before a training, and return the run. Raise one error that lists all errors.

    `more_findings` are added to those of the rules. `name_is_certain` is False if another package may register an
    estimator of this name in the trainer's process. A run that uses only the name is then warned and not rejected.
    Return None for a configuration without the section `algorithm`.
    """
    if not has_algorithm(config):
        return None
    run = Run(estimator_name(config), config=config)
    _apply_rules(run, rules_of_verl_ext=run.uses_verl_ext)
    run.findings = (*run.findings, *more_findings)
    if not run.errors:
        return run
    lines = "".join(f"\n  - {error}" for error in run.errors)
    uses_only_name = list(entries_in_use(config)) == [ESTIMATOR]
    if name_is_certain or not uses_only_name:
        raise ConfigurationError(f"This run cannot start with algorithm.adv_estimator={run.name}:{lines}")
    logger.warning(
        "verl_ext would reject this run with algorithm.adv_estimator=%s. It continues, because your code may "
        "register another estimator under this name:%s",
        *(run.name, lines),
    )
    return run


def log_run(run: Run) -> None:
    """Log a summary of the run, as `check` prints it, and the warnings."""
    if run.uses_verl_ext:
        logger.info("%s", "\n".join([SUMMARY, *describe(run)]))
    for finding in run.findings:
        if finding.severity == "warning":
            logger.warning("%s", finding)


def judge(config: Any) -> Run:
    """Judge a configuration by both lists of rules, as `check` does, and return the run with the findings."""
    run = Run(estimator_name(config), config=config)
    _apply_rules(run, rules_of_verl_ext=True)
    return run


def _apply_rules(run: Run, *, rules_of_verl_ext: bool) -> None:
    """Read the settings, build the steps, and collect the findings."""
    if run.computes_advantages:
        hooks.require(*NEEDED_HOOKS)
    findings: list[Finding] = []
    settings_are_read = False
    try:
        run.settings = read_settings(run.config)
        changed_sections(run.settings)  # raises if the section of another estimator is wrong
        settings_are_read = True
        if run.computes_advantages:
            run.chain = build(run.name, run.settings)
    except ConfigurationError as error:
        findings.append(Finding("error", str(error), ""))
    for_every_run = list(_findings(run, FOR_EVERY_RUN, settings_are_read=settings_are_read))
    if rules_of_verl_ext:
        findings += _findings(run, FOR_RUNS_OF_VERL_EXT, settings_are_read=settings_are_read)
    if not run.uses_verl_ext:
        findings = [finding._replace(severity="warning") for finding in findings]
    run.findings = tuple(dict.fromkeys([*for_every_run, *findings]))


def _findings(run: Run, rules: Iterable[Rule], *, settings_are_read: bool) -> Iterator[Finding]:
    """Yield what rules report about a run."""
    for rule in rules:
        if rule.needs_settings and not settings_are_read:
            continue
        if rule.for_training and run.only_validates:
            continue
        try:
            yield from rule.find(run)
        except ConfigurationError as error:  # an entry that the rule cannot read
            yield Finding("error", str(error), "")
