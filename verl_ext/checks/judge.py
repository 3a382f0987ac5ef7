"""Judge the configuration of a run by the rules."""

import logging
from collections.abc import Iterator
from typing import Any

from verl_ext import hooks
from verl_ext.checks import rules
from verl_ext.checks.describe import describe
from verl_ext.checks.rewards import dropped
from verl_ext.errors import ConfigurationError, Finding
from verl_ext.registry import build, changed_sections
from verl_ext.run import Run
from verl_ext.run_config import ESTIMATOR, entries_in_use, estimator_name, has_algorithm, read_settings

logger = logging.getLogger("verl_ext")

NEEDED = ("verl.trainer.ppo.core_algos", "verl.utils.config", "verl.trainer.main_ppo")
"""What every estimator of ours needs: verl's lookup of estimators, and the starts at which a run is checked."""


def check_run(config: Any, main: str | None = None, *, by_name: bool = True) -> Run | None:
    """Judge a configuration, and return the run. Raise one error that lists all errors.

    `main` is the source code of the main program. Without `by_name`, a run that uses only an estimator of verl_ext is
    not rejected but warned, because another package may register an estimator of this name in the trainer's process.
    Return None for a configuration without the section `algorithm`.
    """
    if not has_algorithm(config):
        return None
    run = judge(config, thorough=False)
    errors = list(run.errors)
    if run.uses_verl_ext and main is not None:
        errors += dropped(config, [main])
    if not errors:
        return run
    lines = "".join(f"\n  - {error}" for error in errors)
    uses_only_the_name = list(entries_in_use(config)) == [ESTIMATOR]
    if by_name or not uses_only_the_name:
        raise ConfigurationError(f"This run cannot start with algorithm.adv_estimator={run.name}:{lines}")
    logger.warning(
        "verl_ext would reject this run with algorithm.adv_estimator=%s. It continues, because your code may "
        "register another estimator under this name:%s",
        *(run.name, lines),
    )
    return run


SUMMARY = "verl_ext: summary of this run"
"""The first line of the summary in the log of a training."""


def log_run(run: Run) -> None:
    """Log a summary of the run, as `check` prints it, and the warnings."""
    if run.uses_verl_ext:
        logger.info("%s", "\n".join([SUMMARY, *describe(run)]))
    for finding in run.findings:
        if finding.severity == "warning":
            logger.warning("%s", finding)


def judge(config: Any, *, thorough: bool = True) -> Run:
    """Read a configuration and collect the findings about it.

    For a run that does not use verl_ext, most findings are warnings, and there are few unless `thorough`.
    """
    run = Run(estimator_name(config), config=config)
    if run.computes_advantages:
        hooks.require(*NEEDED)
    is_judged = run.uses_verl_ext or thorough
    judging = rules.ALWAYS if is_judged else ()
    findings: list[Finding] = []
    try:
        run.settings = read_settings(config)
        changed_sections(run.settings)
        if is_judged:
            judging += rules.READ
        if run.computes_advantages:
            run.chain = build(run.name, run.settings)
    except ConfigurationError as error:
        findings.append(Finding("error", str(error), ""))
    findings += _of_rules(run, judging)
    if not run.uses_verl_ext:  # another package may read a section that looks like one of verl_ext
        findings = [finding._replace(severity="warning") for finding in findings]
    unique_findings = dict.fromkeys([*_of_rules(run, rules.MEANT), *findings])
    run.findings = tuple(unique_findings)
    return run


def _of_rules(run: Run, judging: tuple[rules.Rule, ...]) -> Iterator[Finding]:
    """Yield what rules have against a run."""
    if run.only_validates:
        judging = tuple(rule for rule in judging if rule not in rules.OF_TRAINING)
    for judged in (rule(run) for rule in judging):
        try:
            yield from judged
        except ConfigurationError as error:  # an entry that the rule cannot read
            yield Finding("error", str(error), "")
