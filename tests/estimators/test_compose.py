"""Lists of steps: the same numbers as the named estimators, and the lists that are rejected."""

import json
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest
from omegaconf import OmegaConf

from tests.estimators import every
from tests.estimators.every import KEYS
from tests.facts import facts, says
from verl_ext import ESTIMATORS, Center, Chain, Finding, Method, Settings, WeightedSum, build
from verl_ext.checks.dry_run import dry_run
from verl_ext.core.step_lists import STEPS, as_list
from verl_ext.errors import ConfigurationError
from verl_ext.methods import METHODS
from verl_ext.registry import possible_bases
from verl_ext.run import Run

EVERY = [
    *every.ESTIMATORS.values(),
    ("gdpo", KEYS | {"gdpo": {"scale": "mad", "whiten": "none"}}),
    ("gdpo", KEYS | {"gdpo": {"epsilon": 1e-4}}),
    ("gdpo", KEYS | {"norm_adv_by_std_in_grpo": False}),
    ("dgpo", KEYS | {"dgpo": {"dqw": False, "balance": "none"}}),
    ("dgpo", KEYS | {"dgpo": {"dqw_temp": 0.5}}),
    ("dgpo", KEYS | {"use_kl_in_reward": True}),
    ("hadw", KEYS | {"hadw": {"anchor": "fixed", "fixed_anchor": 0.5, "lambda_scale": 1.0}}),
    ("hadw", KEYS | {"hadw": {"base": "gdpo", "history_window": 2, "eta": 0.5, "eta_min": 0.0}}),
]


@pytest.mark.parametrize(("name", "config"), [*EVERY, ("maxrl", KEYS | {"maxrl": {"epsilon": 0.1}})])
def test_the_list_of_a_named_estimator_is_that_estimator(name, config):
    chain = build(name, Settings.parse(config))
    steps = json.loads(json.dumps(as_list(chain)))
    shared = {key: config[key] for key in ("rewards", "norm_adv_by_std_in_grpo", "use_kl_in_reward") if key in config}
    assert composed(*steps, **shared) == chain


def test_every_step_occurs_in_the_list_of_an_estimator():
    """Or in a list of docs/pages/lists.md, with which tests/test_docs_lists.py computes."""
    named = [*EVERY, ("maxrl", {})]
    used = {step.name for name, config in named for step in build(name, Settings.parse(config)).steps}
    assert used | {"length_penalty"} >= set(STEPS)  # an estimator may have steps that are not built in


def composed(*steps, **algorithm) -> Chain:
    """Return the chain of a list of steps."""
    return build("compose", Settings.parse({"compose": {"steps": list(steps)}} | algorithm))


def findings_at_start_up(*steps, **algorithm) -> list[Finding]:
    """Return the findings for a list of steps that has been built."""
    settings = Settings.parse({"compose": {"steps": list(steps)}} | algorithm)
    return list(dry_run(Run("compose", settings, build("compose", settings), OmegaConf.create())))


SUMMED = ["weighted_sum", "center"]
SAW = {"step": "weight_by_variation", "min_values": [0.0]}
LEAVE_ONE_OUT = {"step": "center", "leave_one_out": True}
PENALTY = {"step": "length_penalty", "weight": 0.1}
WRONG = [
    ([], ("algorithm.compose.steps", "[weighted_sum,center,scale_by_std]", "verl_ext show gdpo")),
    (["centr", "weighted_sum"], ("steps[0]", "'centr'", "did you mean 'center'", "'balance'", "package.module:Class")),
    (["center"], ("algorithm.compose.steps", "weighted_sum", "found 0")),
    ([*SUMMED, "weighted_sum"], ("weighted_sum", "found 2")),
    (["center", "soft_min", "weighted_sum"], ("algorithm.compose.steps", "found 2")),
    # A step in the wrong place.
    (["drop_conflicts", "center", "weighted_sum"], ("steps[0]", "drop_conflicts", "must come after center")),
    (["weight_by_density", "center", "weighted_sum"], ("steps[0]", "weight_by_density", "must come after center")),
    (["weighted_sum", "weight_by_history"], ("steps[1]", "weight_by_history", "must come after center")),
    *(
        ([*SUMMED, name], ("steps[2]", f"{name} must come before the sum", f"Move {name} before weighted_sum"))
        for name in ("drop_conflicts", "scale_by_common_std", "scale_by_correlation", "weight_by_density")
    ),
    (["weighted_sum", SAW, "center"], ("steps[1]", "weight_by_variation must come before the sum")),
    ([*SUMMED, PENALTY], ("steps[2]", "length_penalty must come before center", "Put center after length_penalty")),
    (["center", PENALTY, "weighted_sum"], ("steps[1]", "length_penalty must come before center")),
    # A step that occurs twice.
    ([*SUMMED, "balance", "balance"], ("steps[3]", "balance occurs twice", "Remove one")),
    ([*SUMMED, "weight_by_history", "weight_by_history"], ("steps[3]", "weight_by_history occurs twice")),
    (["center", "scale_by_std", "scale_by_std", "weighted_sum"], ("steps[2]", "scale_by_std occurs twice")),
    (["center", SAW, "scale_by_std", SAW, "weighted_sum"], ("steps[3]", "weight_by_variation occurs twice")),
    # Settings of a step.
    (["weighted_sum", "length_penalty", "center"], ("steps[1]", "length_penalty needs the setting 'weight'")),
    ([*SUMMED, {"step": "scale_by_std", "epsilom": 1}], ("scale_by_std", "'epsilom'", "did you mean 'epsilon'")),
    ([*SUMMED, {"step": "balance", "over": "rows"}], ("balance.over", "'rows'", "'sequence', 'token'")),
    ([{"step": "weighted_sum", "weights": [1]}, "center"], ("weighted_sum", "algorithm.rewards.weights")),
    ([{"step": "condition", "conditions": {}}, *SUMMED], ("steps[0]", "'condition'")),
    (
        ["center", {"step": "drop_conflicts", "tau": 0.5}, "weighted_sum"],
        ("steps[1]", "tau=0.5", "conflict=hard", "conflict=snr"),
    ),
    ([*SUMMED, {"step": "weight_by_focal", "gamma": -1}], ("weight_by_focal.gamma", "at least 0", "found -1")),
    # An entry that is not a step.
    *(
        ([item, *SUMMED], ("steps[0]", "{step: name, setting: value}", f"found {item!r}"))
        for item in (3, {"step": 3}, {"epsilon": 1})
    ),
    (["no.such.module:Step", *SUMMED], ("'no.such.module:Step'", "No module named 'no'", "PYTHONPATH")),
    (["verl_ext.core.steps:Whitten", *SUMMED], ("verl_ext.core.steps", "no attribute 'Whitten'")),
    (["verl_ext.core.chain:listed", *SUMMED], ("'verl_ext.core.chain:listed'", "verl_ext.Step")),
    (["verl_ext.core.steps:Center", *SUMMED], ("'center'", "'verl_ext.core.steps:Center'")),
]


@pytest.mark.parametrize(("steps", "words"), WRONG, ids=[str(index) for index in range(len(WRONG))])
def test_a_wrong_list_is_rejected_with_the_reason(steps, words):
    with pytest.raises(ConfigurationError, match=facts(*words)):
        composed(*steps)


NO_EFFECT = "no effect: without it, the advantages of synthetic batches are the same"
NOT_CENTERED = "gets values whose mean is not 0 in each group"
WITHOUT_EFFECT = [
    # A division by the standard deviation of the group cancels any factor of the group or of the batch.
    *(
        ([*SUMMED, name, "scale_by_std"], ("Step 3", name, NO_EFFECT))
        for name in ("balance", "weight_by_difficulty", "weight_by_focal", "whiten")
    ),
    ([*SUMMED, "scale_by_mad", "scale_by_std"], ("Step 3", "scale_by_mad", NO_EFFECT)),
    ([*SUMMED, "scale_by_std", "scale_by_mad"], ("Step 3", "scale_by_std", NO_EFFECT)),
    *(
        (["weighted_sum", first, "center", second], ("Step 2", first, NO_EFFECT))
        for first in ("divide_by_mean", "divide_by_batch_std")
        for second in ("scale_by_std", "scale_by_mad")
    ),
    (["divide_by_mean", "center", "scale_by_std", "weighted_sum"], ("Step 1", "divide_by_mean", NO_EFFECT)),
    (["center", SAW, "scale_by_std", "weighted_sum"], ("Step 2", "weight_by_variation", NO_EFFECT)),
    (["center", "weight_by_density", "scale_by_std", "soft_min"], ("Step 2", "weight_by_density", NO_EFFECT)),
    (
        ["center", "scale_by_correlation", "weighted_sum", "scale_by_std"],
        ("Step 2", "scale_by_correlation", NO_EFFECT),
    ),
    (["weighted_sum", LEAVE_ONE_OUT, "scale_by_std"], ("Step 2", "leave_one_out=True", "no effect")),
    # So do a division by the mean of the group and one by the standard deviation of the batch.
    *(
        (["weighted_sum", first, second, "center"], ("Step 2", first, NO_EFFECT))
        for first, second in (
            ("balance", "divide_by_mean"),
            ("balance", "divide_by_batch_std"),
            ("divide_by_batch_std", "divide_by_mean"),
        )
    ),
    (["weighted_sum", "divide_by_batch_std", "center", "whiten"], ("Step 2", "divide_by_batch_std", NO_EFFECT)),
    ([*SUMMED, "balance", "whiten"], ("Step 3", "balance", NO_EFFECT)),
    # The values that a step divides are not centered.
    (
        ["weighted_sum", "scale_by_std"],
        ("Step 2", "scale_by_std", NOT_CENTERED, "Add center directly before scale_by_std"),
    ),
    ([*SUMMED, "weight_by_history", "scale_by_std"], ("Step 4", "scale_by_std", NOT_CENTERED)),
    (["center", "drop_conflicts", "scale_by_mad", "weighted_sum"], ("Step 3", "scale_by_mad", NOT_CENTERED)),
    # A step that gets several values per response, but needs one.
    *(
        ([*before, "weighted_sum", "center"], ("one value per row", f"Put weighted_sum before {name}"))
        for name, before in (
            ("weight_by_history", ["center", "weight_by_history"]),
            ("length_penalty", [PENALTY]),
            ("balance", ["balance"]),
        )
    ),
]


@pytest.mark.parametrize(("steps", "words"), WITHOUT_EFFECT, ids=[str(index) for index in range(len(WITHOUT_EFFECT))])
def test_a_list_that_cannot_work_or_has_a_step_without_effect_is_rejected_at_start_up(steps, words):
    """Each of these lists follows the rules on the order of its steps, so that it can be built."""
    (finding,) = findings_at_start_up(*steps, rewards={"keys": ["x"]})
    assert finding.severity == "error"
    assert says(finding, *words)


VALID = [
    # A division of each reward and a division of the sum are different steps.
    *(
        [*first, "weighted_sum", "scale_by_std", "whiten"]
        for first in (["divide_by_batch_std", "center"], ["divide_by_mean", "center"], ["center", "scale_by_mad"])
    ),
    [*SUMMED, "divide_by_batch_std"],
    # The soft minimum depends on the size of the rewards.
    ["weight_by_focal", "soft_min", "divide_by_mean"],
]


@pytest.mark.parametrize("steps", VALID, ids=[str(index) for index in range(len(VALID))])
def test_a_valid_list_has_no_findings(steps):
    assert findings_at_start_up(*steps, rewards={"keys": ["x", "y", "z"]}) == []


@dataclass(frozen=True)
class BaseSettings:
    """Settings of a method that builds on another one."""

    base: str = "grpo"
    """Estimator that comes first."""


def test_hadw_builds_on_every_method_that_builds_on_no_other(monkeypatch):
    centered = (WeightedSum(), Center())
    others = {
        "raw": Method.from_steps("a test", "sums the rewards", (WeightedSum(),)),
        "centered": Method.from_steps("a test", "centers the sum", centered),
        "building": Method(
            "a test", "builds on grpo", lambda _section, _settings: (), settings=BaseSettings, base_setting="base"
        ),
        "broken": EntryPoint("broken", "no_such_package:METHOD", "verl_ext.estimators"),
    }
    for name, method in others.items():
        monkeypatch.setitem(ESTIMATORS, name, method)
    assert possible_bases() == [*sorted(METHODS.keys() - {"hadw"}), "raw", "centered"]
    for base in ("hadw", "broken", "building"):
        with pytest.raises(ConfigurationError, match=facts("algorithm.hadw.base", repr(base), "'centered', 'compose'")):
            build("hadw", Settings.parse({"hadw": {"base": base}}))
    with pytest.raises(
        ConfigurationError, match=facts("algorithm.hadw.base=raw", "must come after center", "compares")
    ):
        build("hadw", Settings.parse({"hadw": {"base": "raw"}}))
    assert build("hadw", Settings.parse({"hadw": {"base": "centered"}})).stateful


def test_hadw_builds_on_a_list_of_steps():
    steps = ["weighted_sum", "center"]
    on_list = {"hadw": {"base": "compose"}, "compose": {"steps": steps}}
    assert [step.name for step in build("hadw", Settings.parse(on_list)).steps] == [*steps, "weight_by_history"]
    with pytest.raises(
        ConfigurationError, match=facts("algorithm.hadw.base=compose", "weight_by_history occurs twice")
    ):
        build("hadw", Settings.parse({**on_list, "compose": {"steps": [*steps, "weight_by_history"]}}))
