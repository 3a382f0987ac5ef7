"""Lists of steps: the same numbers as the named estimators, and what is refused."""

import json
import sys
from types import SimpleNamespace

import pytest

from tests.estimators import every
from tests.estimators.every import KEYS
from tests.facts import facts
from verl_ext import ESTIMATORS, Center, Chain, Settings, WeightedSum, build
from verl_ext.core.step_lists import STEPS, as_list
from verl_ext.errors import ConfigurationError
from verl_ext.methods.hadw import bases
from verl_ext.methods.simple import ROWS
from verl_ext.registry import BUILT_IN

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


def test_every_step_stands_in_the_list_of_some_estimator():
    """Or in a list of docs/pages/lists.md; tests/test_docs_lists.py computes with those."""
    named = [*EVERY, ("maxrl", {})]
    used = {step.name for name, config in named for step in build(name, Settings.parse(config)).steps}
    assert used | {"length_penalty"} >= set(STEPS)  # an estimator may have steps of its own


def composed(*steps, **algorithm):
    return build("compose", Settings.parse({"compose": {"steps": list(steps)}} | algorithm))


SUMMED = ["weighted_sum", "center"]
SAW = {"step": "weight_by_variation", "min_values": [0.0]}
WRONG = [
    ([], ("algorithm.compose.steps", "[weighted_sum,center,scale_by_std]", "verl_ext show gdpo")),
    (["centr", "weighted_sum"], ("steps[0]", "'centr'", "did you mean 'center'", "'balance'", "package.module:Class")),
    (["center"], ("algorithm.compose.steps", "weighted_sum", "found 0")),
    ([*SUMMED, "weighted_sum"], ("weighted_sum", "found 2")),
    (["center", "soft_min", "weighted_sum"], ("algorithm.compose.steps", "found 2")),
    # What must come before a step.
    (["weighted_sum", "scale_by_std"], ("steps[1]", "scale_by_std", "must come after center")),
    (["drop_conflicts", "center", "weighted_sum"], ("steps[0]", "drop_conflicts", "must come after center")),
    (["weighted_sum", "weight_by_history"], ("steps[1]", "weight_by_history", "must come after center")),
    (["center", "weight_by_history", "weighted_sum"], ("weight_by_history", "must come after weighted_sum")),
    (
        [{"step": "length_penalty", "weight": 0.1}, *SUMMED],
        ("steps[0]", "length_penalty", "must come after weighted_sum"),
    ),
    # What must not.
    *(
        ([*SUMMED, name, "scale_by_std"], ("steps[3]", "scale_by_std", f"not come after {name}"))
        for name in ("balance", "weight_by_difficulty", "weight_by_history", "weight_by_focal", "whiten")
    ),
    (["center", "drop_conflicts", "scale_by_mad", "weighted_sum"], ("scale_by_mad", "not come after drop_conflicts")),
    ([*SUMMED, "drop_conflicts"], ("steps[2]", "drop_conflicts", "not come after weighted_sum")),
    ([*SUMMED, "scale_by_common_std"], ("steps[2]", "scale_by_common_std", "not come after weighted_sum")),
    (["center", "scale_by_correlation", "weighted_sum", "scale_by_std"], ("not come after scale_by_correlation",)),
    (["center", "weight_by_density", "scale_by_std", "soft_min"], ("steps[2]", "not come after weight_by_density")),
    ([*SUMMED, "balance", "whiten"], ("steps[3]", "whiten", "not come after balance")),
    ([*SUMMED, "divide_by_batch_std"], ("steps[2]", "divide_by_batch_std", "not come after center")),
    # A division that a later one undoes: of each reward, or of the sum.
    *(
        (["weighted_sum", first, "center", second], ("steps[3]", second, f"not come after {first}"))
        for first in ("divide_by_mean", "divide_by_batch_std")
        for second in ("scale_by_std", "scale_by_mad")
    ),
    (["divide_by_mean", "center", "scale_by_std", "weighted_sum"], ("steps[2]", "not come after divide_by_mean")),
    (["weighted_sum", "divide_by_batch_std", "divide_by_mean", "center"], ("not come after divide_by_batch_std",)),
    (["weighted_sum", "divide_by_batch_std", "center", "whiten"], ("not come after divide_by_batch_std",)),
    (["weighted_sum", "balance", "divide_by_mean", "center"], ("divide_by_mean", "not come after balance")),
    (["weighted_sum", "balance", "divide_by_batch_std", "center"], ("divide_by_batch_std", "not come after balance")),
    ([*SUMMED, "scale_by_mad", "scale_by_std"], ("steps[3]", "scale_by_std", "not come after scale_by_mad")),
    ([*SUMMED, "scale_by_std", "scale_by_mad"], ("steps[3]", "scale_by_mad", "not come after scale_by_std")),
    (["weighted_sum", {"step": "center", "leave_one_out": True}, "scale_by_std"], ("scale_by_std", "leave_one_out")),
    (
        ["center", SAW, "scale_by_std", "weighted_sum"],
        ("steps[2]", "not come after weight_by_variation"),
    ),
    (["weighted_sum", SAW, "center"], ("steps[1]", "not come after weighted_sum")),
    ([*SUMMED, {"step": "length_penalty", "weight": 0.1}], ("steps[2]", "length_penalty", "not come after center")),
    (["weighted_sum", "length_penalty", "center"], ("steps[1]", "length_penalty needs the setting 'weight'")),
    ([*SUMMED, "balance", "balance"], ("steps[3]", "balance", "not come after balance")),
    ([*SUMMED, "weight_by_history", "weight_by_history"], ("weight_by_history", "only once")),
    # Settings of a step.
    ([*SUMMED, {"step": "scale_by_std", "epsilom": 1}], ("scale_by_std", "'epsilom'", "did you mean 'epsilon'")),
    ([*SUMMED, {"step": "balance", "over": "rows"}], ("balance.over", "'rows'", "'sequence', 'token'")),
    ([{"step": "weighted_sum", "weights": [1]}, "center"], ("weighted_sum", "algorithm.rewards.weights")),
    ([{"step": "condition", "conditions": {}}, *SUMMED], ("steps[0]", "'condition'")),
    (
        ["center", {"step": "drop_conflicts", "tau": 0.5}, "weighted_sum"],
        ("steps[1]", "tau=0.5", "conflict=hard", "conflict=snr"),
    ),
    ([*SUMMED, {"step": "weight_by_focal", "gamma": -1}], ("weight_by_focal.gamma", "at least 0", "found -1")),
    # What is no step.
    *(
        ([item, *SUMMED], ("steps[0]", "{step: name, setting: value}", f"found {item!r}"))
        for item in (3, {"step": 3}, {"epsilon": 1})
    ),
    (["no.such.module:Step", *SUMMED], ("'no.such.module:Step'", "No module named 'no'", "PYTHONPATH")),
    (["verl_ext.core.steps:Whitten", *SUMMED], ("verl_ext.core.steps", "no attribute 'Whitten'")),
    (["verl_ext.core.steps:listed", *SUMMED], ("'verl_ext.core.steps:listed'", "verl_ext.Step")),
    (["verl_ext.core.steps:Center", *SUMMED], ("'center'", "'verl_ext.core.steps:Center'")),
]


@pytest.mark.parametrize(("steps", "found"), WRONG, ids=[str(index) for index in range(len(WRONG))])
def test_a_wrong_list_is_refused_with_the_reason(steps, found):
    with pytest.raises(ConfigurationError, match=facts(*found)):
        composed(*steps)


def test_hadw_takes_what_builds_on_no_other_and_can_be_followed(monkeypatch):
    def raw(_settings):
        return Chain((WeightedSum(),))

    def centered(settings):
        return Chain((WeightedSum(), Center()))

    others = {"raw": {"raw": raw}, "centered": {"centered": centered}, "broken": {}}
    others["building"] = {"building": centered, "bases": lambda: ["grpo"]}
    for name, module in others.items():
        monkeypatch.setitem(ESTIMATORS, name, name)
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**module))
    assert bases() == [*sorted({*BUILT_IN, *ROWS} - {"hadw"}), "raw", "centered"]
    for base in ("hadw", "broken", "building"):
        with pytest.raises(ConfigurationError, match=facts("algorithm.hadw.base", repr(base), "'centered', 'compose'")):
            build("hadw", Settings.parse({"hadw": {"base": base}}))
    with pytest.raises(
        ConfigurationError, match=facts("algorithm.hadw.base=raw", "must come after center", "compares")
    ):
        build("hadw", Settings.parse({"hadw": {"base": "raw"}}))
    assert build("hadw", Settings.parse({"hadw": {"base": "centered"}})).stateful
    steps = ["weighted_sum", "center"]
    on_list = {"hadw": {"base": "compose"}, "compose": {"steps": steps}}
    assert [step.name for step in build("hadw", Settings.parse(on_list)).steps] == [*steps, "weight_by_history"]
    with pytest.raises(ConfigurationError, match="only once"):
        build("hadw", Settings.parse({**on_list, "compose": {"steps": [*steps, "weight_by_history"]}}))


def test_a_division_of_each_reward_and_one_of_the_sum_are_two_things():
    assert composed({"step": "center", "leave_one_out": True}, "weighted_sum", "center", "scale_by_std").steps
    for first in (["divide_by_batch_std", "center"], ["divide_by_mean", "center"], ["center", "scale_by_mad"]):
        assert composed(*first, "weighted_sum", "center", "scale_by_std", "whiten").steps
