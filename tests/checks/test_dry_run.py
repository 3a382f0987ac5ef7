"""Dry runs of lists of steps: a step or a setting without effect, and a list that fails, are findings."""

import pytest

from tests.configs import compose_quickly as compose
from tests.facts import a_line_says, facts, says
from verl_ext import Center, Method, WeightedSum
from verl_ext.checks.judge import check_run, judge
from verl_ext.cli import main
from verl_ext.errors import ConfigurationError
from verl_ext.registry import ADDED_ESTIMATORS, ESTIMATORS

CUSTOM_STEPS = "tests.integration.custom_steps"
KEYS = "+algorithm.rewards.keys=[acc,format]"
COMPLETE = ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.use_dynamic_bsz=True")


def overrides_for(steps: str, keys: str = KEYS) -> tuple[str, ...]:
    """Return the overrides of a run with a list of steps."""
    accuracy = "+algorithm.rewards.accuracy_key=acc"
    return ("algorithm.adv_estimator=compose", f"+algorithm.compose.steps=[{steps}]", keys, accuracy)


def findings_for(steps: str, *overrides: str, keys: str = KEYS):
    """Return the findings about a run with a list of steps."""
    config = compose(*overrides_for(steps, keys), *overrides)
    return judge(config).findings


CENTERED_TWICE = "center,scale_by_std,weighted_sum,center"
LEAVE_ONE_OUT = "{step:center,leave_one_out:True}"
WEIGHT_BY_VARIATION = "{step:weight_by_variation,min_values:[0,0]}"


def test_step_without_effect_is_an_error_of_check_and_of_a_start(capsys):
    assert main(["check", *overrides_for(CENTERED_TWICE), *COMPLETE]) == 1
    output = capsys.readouterr().out
    assert a_line_says(output, "error", "Step 4", "center", "no effect", "Remove center", "move it")
    with pytest.raises(ConfigurationError, match=facts("cannot start", "Step 4", "center", "Remove center")):
        check_run(compose(*overrides_for(CENTERED_TWICE)))


def test_step_without_effect_before_a_custom_step_is_a_warning(capsys):
    """A clip, for example, may hide the effect of an earlier step on synthetic batches."""
    steps = f"{CENTERED_TWICE},'{CUSTOM_STEPS}:Clip'"
    (finding,) = findings_for(steps)
    assert finding.severity == "warning"
    assert says(finding, "Step 4", "center", "no effect", "Remove center")
    check_run(compose(*overrides_for(steps)))
    capsys.readouterr()
    assert main(["check", *overrides_for(steps), *COMPLETE]) == 0
    assert a_line_says(capsys.readouterr().out, "warning", "Step 4", "center")


def test_step_without_effect_after_a_custom_step_is_an_error():
    clip = f"{{step:'{CUSTOM_STEPS}:Clip',limit:0.2}}"
    (finding,) = findings_for(f"center,{clip},center,scale_by_std,weighted_sum,center")
    assert finding.severity == "error"
    assert says(finding, "Step 6", "center")


# The list, and facts of its only finding: the step by its place and name, and the fix.
REJECTED = {
    # A later division removes what an earlier step did.
    **{
        f"weighted_sum,center,{step},scale_by_std": ("Step 3", step, "no effect", f"Remove {step}", "move it")
        for step in ("balance", "weight_by_difficulty", "weight_by_focal", "whiten", "scale_by_mad")
    },
    **{
        f"weighted_sum,{first},center,{second}": ("Step 2", first, "no effect", f"Remove {first}")
        for first in ("divide_by_mean", "divide_by_batch_std", "balance")
        for second in ("scale_by_std", "scale_by_mad")
    },
    "divide_by_mean,center,scale_by_std,weighted_sum": ("Step 1", "divide_by_mean", "Remove divide_by_mean"),
    "weighted_sum,center,balance,whiten": ("Step 3", "balance", "no effect", "Remove balance"),
    "weighted_sum,divide_by_batch_std,center,whiten": ("Step 2", "divide_by_batch_std", "no effect"),
    "weighted_sum,divide_by_batch_std,divide_by_mean,center": ("Step 2", "divide_by_batch_std", "no effect"),
    "weighted_sum,balance,divide_by_batch_std,center": ("Step 2", "balance", "no effect"),
    "center,weight_by_density,scale_by_std,soft_min": ("Step 2", "weight_by_density", "no effect"),
    f"center,{WEIGHT_BY_VARIATION},scale_by_std,weighted_sum": ("Step 2", "weight_by_variation", "no effect"),
    "center,scale_by_correlation,weighted_sum,scale_by_std": ("Step 2", "scale_by_correlation", "no effect"),
    # A setting that the next step cancels.
    f"weighted_sum,{LEAVE_ONE_OUT},scale_by_std": ("Step 2", "center", "leave_one_out=True", "Remove leave_one_out"),
    "weighted_sum,center,{step:weight_by_focal,gamma:0}": ("Step 3", "weight_by_focal", "Remove weight_by_focal"),
    # Centered twice: only one of the two may be removed.
    "center,weighted_sum,center": ("Step 3", "center", "Remove center"),
    "center,center,weighted_sum": ("Step 2", "center", "Remove center"),
    # Values that are not centered.
    "weighted_sum,scale_by_std": ("Step 2", "scale_by_std", "mean is not 0", "Add center directly before scale_by_std"),
    "weighted_sum,center,weight_by_history,scale_by_std": ("Step 4", "scale_by_std", "Move it directly behind center"),
    "center,drop_conflicts,scale_by_mad,weighted_sum": ("Step 3", "scale_by_mad", "Move it directly behind center"),
    f"weighted_sum,'{CUSTOM_STEPS}:Halved',center": (
        *("Step 2", "halved", "mean is not 0", "Add center directly before halved"),
    ),
    # The error of a step on the synthetic batches.
    "whiten,weighted_sum,center": ("'whiten'", "found 2", "Put weighted_sum before whiten"),
    "center,weight_by_history,weighted_sum": ("'weight_by_history'", "Put weighted_sum before weight_by_history"),
    "weighted_sum,center,divide_by_mean": ("divide_by_mean", "at least 0", "center afterwards"),
    f"weighted_sum,center,'{CUSTOM_STEPS}:Broken'": (
        *("KeyError", "custom_steps.py", "Remove the step", "correct its code"),
    ),
    f"weighted_sum,center,'{CUSTOM_STEPS}:Infinite'": ("not finite", "Return only finite numbers"),
    f"weighted_sum,center,'{CUSTOM_STEPS}:Pair'": ("'pair'", "[1, 2]", "Return a state"),
}


@pytest.mark.parametrize("steps", REJECTED)
def test_list_is_rejected_with_the_step_and_the_fix(steps):
    (finding,) = findings_for(steps)
    assert finding.severity == "error"
    assert says(finding, *REJECTED[steps]), finding


ACCEPTED = (
    "center,scale_by_std,weighted_sum,{step:center,leave_one_out:True}",
    "center,scale_by_std,soft_min,center",
    "weighted_sum,divide_by_batch_std,center",
    "weighted_sum,center,whiten,balance",
    "weighted_sum,center,weight_by_focal,whiten",
    "weighted_sum,{step:length_penalty,weight:0.1},center",
    f"center,scale_by_std,{WEIGHT_BY_VARIATION},weighted_sum,whiten",
    "center,scale_by_std,{step:drop_conflicts,conflict:snr},weighted_sum,whiten",
    "weighted_sum,center,weight_by_difficulty,weight_by_history",
)


@pytest.mark.parametrize("steps", ACCEPTED)
def test_list_in_which_every_step_has_an_effect_is_accepted(steps):
    assert findings_for(steps) == ()


@pytest.mark.parametrize("lists", ["+algorithm.rewards.per_turn=[format]", "+algorithm.rewards.rubrics=[format]"])
def test_per_turn_rewards_and_rubrics_are_part_of_the_dry_run(lists):
    assert findings_for("center,scale_by_std,weighted_sum,whiten,weight_by_difficulty", lists) == ()
    (finding,) = findings_for(CENTERED_TWICE, lists)
    assert says(finding, "Step 4", "center")


def test_list_for_one_reward_is_measured_with_several():
    """With one reward, `scale_by_common_std` removes any earlier factor of the group. With several, it does not."""
    steps = "center,scale_by_std,scale_by_common_std,weighted_sum"
    assert findings_for(steps, keys="+algorithm.rewards.keys=[acc]") == ()
    score = "algorithm.rewards.keys=null"
    assert findings_for("weighted_sum,center,scale_by_std", score) == ()
    (finding,) = findings_for("weighted_sum,center,scale_by_std,scale_by_mad", score)
    assert says(finding, "Step 3", "scale_by_std")


def test_steps_around_a_step_that_reads_fields_are_measured():
    """A synthetic batch has no fields of verl's batch, so what the custom step does is not known."""
    assert findings_for(f"{CENTERED_TWICE},'{CUSTOM_STEPS}:BySource'") == ()
    (finding,) = findings_for(f"weighted_sum,scale_by_std,'{CUSTOM_STEPS}:BySource'")
    assert finding.severity == "error"
    assert says(finding, "Step 2", "scale_by_std", "mean is not 0")
    assert findings_for(f"center,'{CUSTOM_STEPS}:BySource',weighted_sum,center") == ()


def test_custom_step_for_exactly_two_rewards_is_accepted_with_two_keys():
    steps = f"center,'{CUSTOM_STEPS}:HalveSecond',weighted_sum,whiten"
    assert findings_for(steps) == ()
    (finding,) = findings_for(steps, keys="+algorithm.rewards.keys=[acc,format,length]")
    assert finding.severity == "error"
    assert says(finding, "ValueError", "custom_steps.py")


WEIGHTS = "+algorithm.rewards.weights=[1,2]"


def test_weights_that_no_step_applies_are_an_error():
    steps = "center,scale_by_std,soft_min,{step:whiten,over:token}"
    (finding,) = findings_for(steps, WEIGHTS)
    assert finding.severity == "error"
    assert says(finding, "algorithm.rewards.weights", "no effect", "Remove algorithm.rewards.weights")
    assert findings_for(steps) == ()
    assert findings_for("center,scale_by_std,weighted_sum", WEIGHTS) == ()


def test_negative_weights_of_divide_by_mean_are_reported_once():
    weights = "+algorithm.rewards.weights=[-1,-1]"
    (finding,) = findings_for("weighted_sum,divide_by_mean,center", weights)
    assert says(finding, "algorithm.rewards.weights", "at least 0")


def test_step_that_rejects_rubrics_is_reported_once():
    (finding,) = findings_for("divide_by_batch_std,weighted_sum,center", "+algorithm.rewards.rubrics=[format]")
    assert says(finding, "rubrics", "divide_by_batch_std")


@pytest.fixture
def canceled_method(monkeypatch):
    """A method of another package with a built-in step that has no effect."""
    method = Method.from_steps("a test", "centered twice", (Center(), WeightedSum(), Center()))
    monkeypatch.setitem(ESTIMATORS, "canceled", method)
    monkeypatch.setattr("verl_ext.run_config.ADDED_ESTIMATORS", (*ADDED_ESTIMATORS, "canceled"))


@pytest.mark.usefixtures("canceled_method")
def test_method_of_another_package_is_measured():
    run = judge(compose("algorithm.adv_estimator=canceled", KEYS))
    (finding,) = run.errors
    assert says(finding, "Step 3", "center", "no effect", "Remove center")


@pytest.mark.usefixtures("canceled_method")
def test_hadw_on_a_method_of_another_package_is_measured():
    run = judge(compose("algorithm.adv_estimator=hadw", KEYS, "+algorithm.hadw.base=canceled"))
    (finding,) = run.errors
    assert says(finding, "Step 3", "center", "no effect")


def test_built_in_method_is_not_measured():
    """With `gamma=0` the last step of fgrpo has no effect, as its setting says."""
    overrides = ("algorithm.adv_estimator=fgrpo", KEYS, "+algorithm.rewards.accuracy_key=acc")
    assert judge(compose(*overrides, "+algorithm.fgrpo.gamma=0")).findings == ()
    assert findings_for("weighted_sum,center,scale_by_std,{step:weight_by_focal,gamma:0}") != ()


def test_list_with_a_custom_step_for_two_rewards_is_measured_with_two():
    """`HalveSecond` fails with the three rewards with which lists are measured otherwise."""
    (finding,) = findings_for(f"'{CUSTOM_STEPS}:HalveSecond',weighted_sum,scale_by_std")
    assert says(finding, "Step 3", "scale_by_std", "mean is not 0")
