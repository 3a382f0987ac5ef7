"""`verl-ext check`: validate the configuration of a run before it starts.

The configuration is composed as by `python -m verl.trainer.main_ppo`, with the same command line and presets. Neither
Ray nor a model is started. The exit status is 1 if the configuration cannot be composed, and if verl_ext or verl
rejects the run. With `--strict`, it is also 1 for a warning or a note.
"""

from __future__ import annotations

import argparse
import inspect
import io
import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any

from hydra.errors import InstantiationException

from verl_ext.checks.configuration import composed, misspelled_additions
from verl_ext.checks.judge import judge
from verl_ext.checks.rewards import known_components
from verl_ext.checks.summary import describe, plan
from verl_ext.checks.try_reward import try_reward
from verl_ext.checks.verl_settings import old_sections
from verl_ext.errors import ConfigurationError, Finding, VerlExtError, explaining_errors
from verl_ext.files import say
from verl_ext.hooks import temporarily
from verl_ext.run import Run
from verl_ext.run_config import FUNCTION

SEVERITIES = ("error", "warning", "note")
Report = tuple[list[str], list[Finding]]
"""Lines that summarize a part of the run, and findings about it."""


def check(options: argparse.Namespace, *, deadline: float = math.inf) -> int:
    """Print what the run will do and what is wrong with its configuration; return 1 if the run is rejected.

    `deadline` is the time by `time.monotonic()` at which the calls of the reward function end.
    """
    with composed(options) as config:
        run = judge(config)
        lines = [*describe(run)]
        findings = [*run.findings, *old_sections(config), *_findings_of_verl(config)]
        for part in (_plan(run), _rewards(run, options, deadline)):
            lines += part[0]
            findings += part[1]
        findings += [*misspelled_additions(options.overrides), *_unused_options(options)]
    return _print_report(lines, findings, strict=options.strict)


def _print_report(lines: Sequence[str], findings: Sequence[Finding], *, strict: bool) -> int:
    """Print the lines, the findings by severity, and the result; return the exit status."""
    findings = list(dict.fromkeys(findings))  # the rules and the trial may find the same error
    counts = []
    for severity in SEVERITIES:
        of_severity = [finding for finding in findings if finding.severity == severity]
        lines = [*lines, *(f"{severity}: {finding}" for finding in of_severity)]
        counts.append(f"{len(of_severity)} {severity}{'' if len(of_severity) == 1 else 's'}")
    if any(finding.severity == "error" for finding in findings):
        result = "rejected"
    elif strict and findings:
        result = "rejected by --strict"
    else:
        result = "accepted"
    say("\n".join([*lines, f"{result}: {', '.join(counts)}"]))
    return 0 if result == "accepted" else 1


def _plan(run: Run) -> Report:
    """Return what the run will do, or the error that prevents the plan."""
    try:
        with explaining_errors(
            "The plan of the run", ConfigurationError, "computed", "Check the sections trainer and data."
        ):
            return plan(run)
    except ConfigurationError as error:
        return [], [Finding("error", str(error), "")]


def _rewards(run: Run, options: argparse.Namespace, deadline: float) -> Report:
    """Call the reward function if that was asked for."""
    if options.try_reward:
        try:
            return try_reward(run, options, deadline)
        except VerlExtError as error:  # the function cannot be called at all
            return [], [Finding("error", str(error), "")]
    if run.settings.rewards.keys and not run.errors and known_components(run.config) is None:
        function = run.select(f"{FUNCTION}.path") or "the reward function"
        return [f"not called {function} (add --try-reward to verify that it returns these rewards)"], []
    return [], []


def _unused_options(options: argparse.Namespace) -> Iterator[Finding]:
    """Warn about options that say how the reward function is called, if it is not called."""
    if options.try_reward or options.rows < 1:  # `rehearse --rows 0` calls the function later, with the responses
        return
    values = {"--responses": options.responses is not None, "--answer-template": bool(options.answer_template)}
    for option, is_set in values.items():
        if is_set:
            text = f"{option} has no effect without --try-reward, because the reward function is not called."
            yield Finding("warning", text, f"Add --try-reward, or remove {option}.")


def _findings_of_verl(config: Any) -> Iterator[Finding]:
    """Yield what verl's own check, which runs before Ray starts, reports."""
    try:
        _ask_verl(config)
    except Exception as error:  # noqa: BLE001 - its errors are of many kinds
        text = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(". :")
        functions = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
        failed_during_import = isinstance(error, ImportError) or "<module>" in functions
        if failed_during_import or isinstance(error, OSError):  # a file or the network cannot be reached
            yield Finding(
                "warning",
                f"verl's own check of the configuration cannot run on this machine ({text}).",
                "Run `verl-ext check` in the environment of the training.",
            )
        else:
            fix = "Change the settings that this message names."
            yield Finding("error", f"verl rejects the configuration ({text}).", fix)


def _ask_verl(config: Any) -> None:
    """Raise what verl's own check, before Ray starts, has against the configuration."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config
    from verl.workers.config import HFModelConfig

    def load_nothing(_model: Any) -> None:
        """Replace the loading of a tokenizer and a configuration, which may be on a hub that is out of reach."""

    with temporarily(HFModelConfig, "__post_init__", load_nothing), redirect_stdout(io.StringIO()):
        try:
            inspect.unwrap(validate_config)(config, need_reference_policy(config), need_critic(config))
        except InstantiationException as error:
            raise error.__cause__ or error from error
