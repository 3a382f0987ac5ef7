"""The rules for a run's configuration: what is rejected or warned of, and the facts of its message."""

import re
from types import SimpleNamespace

import pytest

import verl_ext
from tests.checks.config_files import judge_config, write_config
from tests.checks.fix_overrides import fix_alternatives, without_settings
from tests.checks.rule_cases import (
    ACCEPTED,
    ACCURACY_IS_CORRECTNESS,
    ACTOR,
    ANY_REWARD,
    COMPOSE,
    CUSTOM_SUM,
    DGPO,
    DRGRPO_WITH_LOSS,
    ERRORS,
    FILTER,
    GDPO,
    GDPO_BY_NAMES_OF_VERL,
    GDPO_WITH_KEYS,
    GRPO,
    GSM8K_REWARD,
    HADW,
    KEYS,
    KEYS_OF_GSM8K,
    KEYS_WITH_PENALTY,
    MAXRL,
    OVERLONG_PENALTY,
    PER_TURN_FORMAT,
    REWARD_KWARGS,
    TOOL_CALLING_REWARD,
    WARNINGS,
    WEIGHTS,
)
from tests.configs import compose as composed_by_hydra
from tests.configs import compose_quickly as compose
from tests.facts import says
from verl_ext import hooks
from verl_ext.checks import estimators, losses
from verl_ext.checks.judge import check_run, judge, log_run
from verl_ext.errors import ConfigurationError, Finding, IntegrationError


def parametrize_cases(cases):
    """Return the decorator for tests of `overrides` and `words`, the facts of a finding."""
    params = [pytest.param(overrides, words, id=name) for name, overrides, words in cases]
    return pytest.mark.parametrize(("overrides", "words"), params)


@pytest.fixture(autouse=True)
def known_verl(monkeypatch):
    """On a verl whose losses the package does not know, the rules are those of the last tested version."""
    if losses.aggregates_itself("sapo") is None:
        monkeypatch.setattr("verl.__version__", list(losses.SELF_AGGREGATING)[-1])


FIRST_WORDS = ("Add", "Keep", "Remove", "Rename", "Return", "Set", "Start", "Use", "Write")
"""The words with which a fix begins."""
FIX_IS_IN_THE_TEXT = (
    "'dqw_temp'",
    "dqw_temp=5.0",
    "'keyz'",
    "'skip_zero_advantge'",
    "'gsm8'",
    "'yes'",
    "nothing",
    "accuracy_between",
)
"""Facts of the findings whose text is that of an exception, which has the fix in it."""


def assert_full_sentences(findings):
    """Assert that each finding has a text and a fix, both of full sentences."""
    for finding in findings:
        assert finding.text.endswith("."), finding
        may_have_no_fix = any(says(finding, fact) for fact in FIX_IS_IN_THE_TEXT)
        if finding.fix or not may_have_no_fix:
            assert finding.fix.startswith(FIRST_WORDS), finding
            assert finding.fix.endswith("."), finding


@parametrize_cases(ERRORS)
def test_configuration_is_rejected(overrides, words):
    config = compose(*overrides)
    run = judge(config)
    assert any(says(error, *words) for error in run.errors), run.errors
    assert_full_sentences(run.findings)
    with pytest.raises(ConfigurationError) as caught:
        check_run(config)
    for error in run.errors:
        assert str(error) in str(caught.value)


@parametrize_cases(WARNINGS)
def test_configuration_has_a_warning(overrides, words):
    run = judge(compose(*overrides))
    assert run.errors == []
    assert any(says(warning, *words) for warning in run.findings), run.findings
    assert_full_sentences(run.findings)


@pytest.mark.parametrize("case", ACCEPTED)
def test_configuration_has_no_findings(case):
    config = compose(*ACCEPTED[case])
    assert check_run(config).findings == ()
    assert judge(config).findings == ()  # by all rules, also if the run does not use verl_ext


@parametrize_cases([*ERRORS, *WARNINGS])
def test_fix_removes_its_finding_and_adds_no_other(overrides, words):
    findings = judge(compose(*overrides)).findings
    for finding in findings:
        for added, removed in fix_alternatives(finding.fix):
            fixed_overrides = [*without_settings(overrides, removed), *added]
            remaining = judge(compose(*fixed_overrides)).findings
            assert set(remaining) < set(findings), (added, removed)
            assert finding not in remaining, (added, removed)


COEFFICIENT_IN_REWARD = "algorithm.kl_ctrl.kl_coef=0.01"
COEFFICIENT_IN_LOSS = f"{ACTOR}.kl_loss_coef=0.01"
USE_KL_LOSS = f"{ACTOR}.use_kl_loss=True"
USE_KL_IN_REWARD = "algorithm.use_kl_in_reward=True"
SKIP_ZERO_ADVANTAGE = "+algorithm.verl_ext.skip_zero_advantage=True"
# The overrides of a run, a coefficient of KL that verl does not read there, and the setting that the fix sets, if any.
UNREAD_KL_COEFFICIENTS = {
    "gdpo": (GDPO_WITH_KEYS, COEFFICIENT_IN_REWARD, USE_KL_LOSS),
    "gdpo that skips": ((*GDPO_WITH_KEYS, SKIP_ZERO_ADVANTAGE), COEFFICIENT_IN_REWARD, USE_KL_LOSS),
    "maxrl": ((MAXRL,), COEFFICIENT_IN_REWARD, USE_KL_LOSS),
    "a custom sum": ((COMPOSE, CUSTOM_SUM, KEYS), COEFFICIENT_IN_REWARD, USE_KL_LOSS),
    "drgrpo per turn": ((*DRGRPO_WITH_LOSS, KEYS, PER_TURN_FORMAT), COEFFICIENT_IN_REWARD, None),
    "drgrpo": (DRGRPO_WITH_LOSS, COEFFICIENT_IN_REWARD, USE_KL_IN_REWARD),
    "grpo": ((GRPO,), COEFFICIENT_IN_REWARD, USE_KL_IN_REWARD),
    "loss of drgrpo": (DRGRPO_WITH_LOSS, COEFFICIENT_IN_LOSS, None),
    "loss that skips": ((GRPO, SKIP_ZERO_ADVANTAGE), COEFFICIENT_IN_LOSS, USE_KL_LOSS),
}


@pytest.mark.parametrize("case", UNREAD_KL_COEFFICIENTS)
def test_fix_for_an_unread_kl_coefficient_is_accepted(case, tmp_path):
    run, coefficient, switch = UNREAD_KL_COEFFICIENTS[case]
    write_config(tmp_path, "defaults: [ppo_trainer, _self_]\n")
    (finding,) = judge_config(tmp_path, *run, coefficient).findings
    fixes = list(fix_alternatives(finding.fix))
    if switch is not None:
        assert any(switch in added for added, _ in fixes)
    removals = [removed for _, removed in fixes if removed]
    assert removals == [[coefficient.partition("=")[0]]]
    for added, removed in fixes:
        fixed_overrides = [*without_settings((*run, coefficient), removed), *added]
        assert judge_config(tmp_path, *fixed_overrides).findings == ()


@pytest.mark.parametrize("preset", [(), ("+verl_ext=gdpo",)], ids=["without a preset", "with a preset"])
def test_fix_for_the_names_of_verl_is_accepted_by_hydra(preset):
    (error,) = judge(composed_by_hydra(*preset, *GDPO_BY_NAMES_OF_VERL)).errors
    lines = re.findall(r"\S+=(?:token|sequence)\b", error.fix)
    assert len(lines) == 2
    for line in lines:
        assert judge(composed_by_hydra(*preset, *GDPO_BY_NAMES_OF_VERL, line)).errors == []


def test_log_of_a_training_begins_with_the_summary_of_check(caplog):
    caplog.set_level("INFO", "verl_ext")
    config = compose(DGPO, KEYS, ACCURACY_IS_CORRECTNESS, "+algorithm.dgpo.balance=sequence")
    log_run(judge(config))
    summary, warning = caplog.messages
    lines = {line.split()[0]: line for line in summary.splitlines()}
    assert verl_ext.__version__ in lines["version"]
    assert "dgpo" in lines["estimator"]
    assert "token-mean" in lines["loss"]
    assert {"steps", "rewards", "accuracy"} <= lines.keys()
    assert says(warning, "algorithm.dgpo.balance=auto")


def test_only_warnings_are_logged(caplog):
    run = judge(compose(GRPO))
    run.findings = tuple(Finding(severity, severity, "") for severity in ("note", "warning", "error"))
    log_run(run)
    assert caplog.messages == ["warning"]


def test_all_errors_are_reported_at_once():
    config = compose(GDPO, "+algorithm.gdop.x=1", GSM8K_REWARD, f"{REWARD_KWARGS}.x=1")
    assert len(judge(config).errors) == 3


def test_accuracy_that_is_not_named_is_reported_once():
    assert len(judge(compose(HADW, KEYS_OF_GSM8K, TOOL_CALLING_REWARD)).errors) == 1


def test_fix_for_a_penalty_that_is_a_reward_adds_no_weight():
    (error,) = judge(compose(GDPO, KEYS_WITH_PENALTY, *OVERLONG_PENALTY, WEIGHTS)).errors
    assert not says(error, "algorithm.rewards.weights")


def test_hook_that_failed_ends_only_runs_with_an_estimator_of_verl_ext(monkeypatch):
    def fail(*modules):
        raise IntegrationError(f"not installed: {modules}")

    monkeypatch.setattr(hooks, "require", fail)
    with pytest.raises(IntegrationError):
        judge(compose(*GDPO_WITH_KEYS))
    assert judge(compose(GRPO, KEYS)).errors == []


@pytest.mark.parametrize(("name", "severity"), [("gae", "warning"), ("dgpo", "error")])
def test_entry_point_with_a_reserved_name_is_reported_if_it_is_selected(monkeypatch, name, severity):
    """verl computes `gae`, and verl_ext computes `dgpo`."""
    target = "their_package:METHOD"
    monkeypatch.setattr(estimators, "ENTRY_POINTS", {name: SimpleNamespace(value=target)})
    selected = compose(f"algorithm.adv_estimator={name}", GSM8K_REWARD, ACCURACY_IS_CORRECTNESS)
    (finding,) = [finding for finding in judge(selected).findings if says(finding, target)]
    assert finding.severity == severity
    for finding in judge(compose(GRPO)).findings:
        assert not says(finding, target)


@pytest.mark.parametrize("run", [DRGRPO_WITH_LOSS, (DGPO,)])
def test_loss_of_an_unknown_verl_is_warned_of_if_the_estimator_relies_on_it(monkeypatch, run):
    monkeypatch.setattr(losses, "SELF_AGGREGATING", {})
    loss = f"{ACTOR}.policy_loss.loss_mode=sapo"
    (finding,) = judge(compose(*run, loss)).findings
    assert says(finding, "loss_mode=sapo")
    assert judge(compose(*run)).findings == ()
    assert judge(compose(*GDPO_WITH_KEYS, loss)).findings == ()


@pytest.mark.parametrize("run", [(HADW,), (GRPO, FILTER, ANY_REWARD), (GRPO, KEYS, SKIP_ZERO_ADVANTAGE)])
def test_experimental_trainer_is_rejected_because_it_calls_nothing_of_verl_ext(run):
    errors = judge(compose(*run, "+rollout.n=1")).errors
    assert any(says(error, "section `rollout`", "trainer_mode=separate_async") for error in errors)
    for error in judge(compose(*run)).errors:
        assert not says(error, "section `rollout`")
