"""Judge the configuration of a run by the rules."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from verl_ext import hooks
from verl_ext.checks import rules
from verl_ext.checks.describe import describe
from verl_ext.checks.rewards import dropped
from verl_ext.errors import ConfigurationError, Finding
from verl_ext.registry import build, changed_sections
from verl_ext.run_config import RunConfig, estimator_name, read_settings
from verl_ext.settings import Settings

logger = logging.getLogger("verl_ext")

NEEDED = ("verl.trainer.ppo.core_algos", "verl.utils.config", "verl.trainer.main_ppo")
"""What every estimator of ours needs: verl's lookup of estimators, and the starts at which a run is checked."""


@dataclass(frozen=True)
class Verdict(RunConfig):
    """The configuration of a run, and what the rules have against it."""

    findings: tuple[Finding, ...]

    @property
    def errors(self) -> list[Finding]:
        """The findings for which the run is rejected."""
        return [finding for finding in self.findings if finding.severity == "error"]


def check_run(config: Any, main: str | None = None, *, by_name: bool = True) -> Verdict | None:
    """Judge a configuration; raise one error that lists all errors. `main`: the source of what begins the run.

    Without `by_name` a run whose estimator alone is ours is warned: in the trainer's process the name may be another's.
    None for a configuration without a section `algorithm`.
    """
    if RunConfig.of(config) is None:
        return None
    verdict = judge(config, thorough=False)
    lost = dropped(config, [main]) if verdict.ours and main is not None else ()
    if errors := [*verdict.errors, *lost]:
        lines = "".join(f"\n  - {error}" for error in errors)
        if by_name or verdict.asked or not verdict.computes:
            raise ConfigurationError(f"This run cannot start with algorithm.adv_estimator={verdict.name}:{lines}")
        logger.warning(
            "verl_ext would reject this run with algorithm.adv_estimator=%s. It continues, because your code may "
            "register another estimator under this name:%s",
            *(verdict.name, lines),
        )
    return verdict


SUMMARY = "verl_ext: summary of this run"
"""The first line of the summary in the log of a training."""


def log_run(verdict: Verdict) -> None:
    """Log a summary of the run, as `check` prints it, and the warnings."""
    if verdict.ours:
        logger.info("%s", "\n".join([SUMMARY, *describe(verdict)]))
    for finding in verdict.findings:
        if finding.severity == "warning":
            logger.warning("%s", finding)


def judge(config: Any, *, thorough: bool = True) -> Verdict:
    """Collect the errors and warnings about a configuration.

    About a run that uses nothing of this package they are mostly warnings, and few unless `thorough`.
    """
    run = RunConfig(estimator_name(config), Settings(), None, config)
    if run.computes:
        hooks.require(*NEEDED)
    judging, more = (rules.ALWAYS, rules.READ) if run.ours or thorough else ((), ())
    findings: list[Finding] = []
    try:
        run = replace(run, settings=read_settings(run.config))
        changed_sections(run.settings)
        judging += more
        run = replace(run, chain=build(run.name, run.settings) if run.computes else None)
    except ConfigurationError as error:
        findings.append(Finding("error", str(error), ""))
    findings += _of_rules(run, judging)
    if not run.ours:  # another package may read what looks like ours
        findings = [finding._replace(severity="warning") for finding in findings]
    unique = dict.fromkeys([*_of_rules(run, rules.MEANT), *findings])
    return Verdict(**vars(run), findings=tuple(unique))


def _of_rules(run: RunConfig, judging: tuple[rules.Rule, ...]) -> Iterator[Finding]:
    """Yield what rules have against a run."""
    if run.only_validates:
        judging = tuple(rule for rule in judging if rule not in rules.OF_TRAINING)
    for judged in (rule(run) for rule in judging):
        try:
            yield from judged
        except ConfigurationError as error:  # an entry that the rule cannot read
            yield Finding("error", str(error), "")
