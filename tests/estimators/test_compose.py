"""Lists of steps: the same numbers as the named estimators, and what is refused."""

import json
import sys
from types import SimpleNamespace

import pytest

from tests.estimators import every
from tests.estimators.every import KEYS
from tests.facts import facts
from verl_ext import ESTIMATORS, Centre, Chain, Settings, WeighAndSum, build
from verl_ext.core.lists import STEPS, as_list
from verl_ext.errors import ConfigurationError
from verl_ext.estimators.hadw import bases
from verl_ext.registry import BUILT_IN
from verl_ext.rows import ROWS

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
    assert used | {"shorten"} >= set(STEPS)  # an estimator may have steps of its own


def composed(*steps, **algorithm):
    return build("compose", Settings.parse({"compose": {"steps": list(steps)}} | algorithm))


SUMMED = ["weigh_and_sum", "centre"]
SAW = {"step": "weigh_by_variation", "lowest": [0.0]}
WRONG = [
    ([], ("algorithm.compose.steps=[...]", "verl_ext show gdpo")),
    (["centr", "weigh_and_sum"], ("steps[0]", "'centr'", "did you mean 'centre'", "'balance'", "package.module:Class")),
    (["centre"], ("algorithm.compose.steps", "weigh_and_sum", "found 0")),
    ([*SUMMED, "weigh_and_sum"], ("weigh_and_sum", "found 2")),
    (["centre", "soft_min", "weigh_and_sum"], ("algorithm.compose.steps", "found 2")),
    # What must come before a step.
    (["weigh_and_sum", "scale_by_std"], ("steps[1]", "scale_by_std", "must come after centre")),
    (["drop_conflicts", "centre", "weigh_and_sum"], ("steps[0]", "drop_conflicts", "must come after centre")),
    (["weigh_and_sum", "weigh_by_history"], ("steps[1]", "weigh_by_history", "must come after centre")),
    (["centre", "weigh_by_history", "weigh_and_sum"], ("weigh_by_history", "must come after weigh_and_sum")),
    ([{"step": "shorten", "weight": 0.1}, *SUMMED], ("steps[0]", "shorten", "must come after weigh_and_sum")),
    # What must not.
    *(
        ([*SUMMED, name, "scale_by_std"], ("steps[3]", "scale_by_std", f"not come after {name}"))
        for name in ("balance", "weigh_by_difficulty", "weigh_by_history", "weigh_by_focal", "whiten")
    ),
    (["centre", "drop_conflicts", "scale_by_mad", "weigh_and_sum"], ("scale_by_mad", "not come after drop_conflicts")),
    ([*SUMMED, "drop_conflicts"], ("steps[2]", "drop_conflicts", "not come after weigh_and_sum")),
    ([*SUMMED, "scale_by_common_std"], ("steps[2]", "scale_by_common_std", "not come after weigh_and_sum")),
    (["centre", "scale_by_correlation", "weigh_and_sum", "scale_by_std"], ("not come after scale_by_correlation",)),
    (["centre", "weigh_by_density", "scale_by_std", "soft_min"], ("steps[2]", "not come after weigh_by_density")),
    ([*SUMMED, "balance", "whiten"], ("steps[3]", "whiten", "not come after balance")),
    ([*SUMMED, "divide_by_batch_std"], ("steps[2]", "divide_by_batch_std", "not come after centre")),
    # A division that a later one undoes: of each reward, or of the sum.
    *(
        (["weigh_and_sum", first, "centre", second], ("steps[3]", second, f"not come after {first}"))
        for first in ("divide_by_mean", "divide_by_batch_std")
        for second in ("scale_by_std", "scale_by_mad")
    ),
    (["divide_by_mean", "centre", "scale_by_std", "weigh_and_sum"], ("steps[2]", "not come after divide_by_mean")),
    (["weigh_and_sum", "divide_by_batch_std", "divide_by_mean", "centre"], ("not come after divide_by_batch_std",)),
    (["weigh_and_sum", "divide_by_batch_std", "centre", "whiten"], ("not come after divide_by_batch_std",)),
    (["weigh_and_sum", "balance", "divide_by_mean", "centre"], ("divide_by_mean", "not come after balance")),
    (["weigh_and_sum", "balance", "divide_by_batch_std", "centre"], ("divide_by_batch_std", "not come after balance")),
    ([*SUMMED, "scale_by_mad", "scale_by_std"], ("steps[3]", "scale_by_std", "not come after scale_by_mad")),
    ([*SUMMED, "scale_by_std", "scale_by_mad"], ("steps[3]", "scale_by_mad", "not come after scale_by_std")),
    (["weigh_and_sum", {"step": "centre", "leave_one_out": True}, "scale_by_std"], ("scale_by_std", "leave_one_out")),
    (
        ["centre", SAW, "scale_by_std", "weigh_and_sum"],
        ("steps[2]", "not come after weigh_by_variation"),
    ),
    (["weigh_and_sum", SAW, "centre"], ("steps[1]", "not come after weigh_and_sum")),
    ([*SUMMED, {"step": "shorten", "weight": 0.1}], ("steps[2]", "shorten", "not come after centre")),
    (["weigh_and_sum", "shorten", "centre"], ("steps[1]", "shorten needs the setting 'weight'")),
    ([*SUMMED, "balance", "balance"], ("steps[3]", "balance", "not come after balance")),
    ([*SUMMED, "weigh_by_history", "weigh_by_history"], ("weigh_by_history", "only once")),
    # Settings of a step.
    ([*SUMMED, {"step": "scale_by_std", "epsilom": 1}], ("scale_by_std", "'epsilom'", "did you mean 'epsilon'")),
    ([*SUMMED, {"step": "balance", "over": "rows"}], ("balance.over", "'rows'", "valid: 'sequence', 'token'")),
    ([{"step": "weigh_and_sum", "weights": [1]}, "centre"], ("weigh_and_sum", "algorithm.rewards.weights")),
    ([{"step": "condition", "conditions": {}}, *SUMMED], ("steps[0]", "'condition'")),
    (
        ["centre", {"step": "drop_conflicts", "tau": 0.5}, "weigh_and_sum"],
        ("steps[1]", "tau=0.5", "conflict=hard", "conflict=snr"),
    ),
    ([*SUMMED, {"step": "weigh_by_focal", "gamma": -1}], ("weigh_by_focal.gamma", "at least 0", "found -1")),
    # What is no step.
    *(
        ([item, *SUMMED], ("steps[0]", "{step: name, setting: value}", f"found {item!r}"))
        for item in (3, {"step": 3}, {"epsilon": 1})
    ),
    (["no.such.module:Step", *SUMMED], ("'no.such.module:Step'", "No module named 'no'", "PYTHONPATH")),
    (["verl_ext.core.steps:Whitten", *SUMMED], ("verl_ext.core.steps", "no attribute 'Whitten'")),
    (["verl_ext.core.steps:listed", *SUMMED], ("'verl_ext.core.steps:listed'", "verl_ext.Step")),
    (["verl_ext.core.steps:Centre", *SUMMED], ("'centre'", "rename 'verl_ext.core.steps:Centre'")),
]


@pytest.mark.parametrize(("steps", "found"), WRONG, ids=[str(index) for index in range(len(WRONG))])
def test_a_wrong_list_is_refused_with_the_reason(steps, found):
    with pytest.raises(ConfigurationError, match=facts(*found)):
        composed(*steps)


def test_hadw_takes_what_builds_on_no_other_and_can_be_followed(monkeypatch):
    def raw(_settings):
        return Chain((WeighAndSum(),))

    def centred(settings):
        return Chain((WeighAndSum(), Centre()))

    others = {"raw": {"raw": raw}, "centred": {"centred": centred}, "broken": {}}
    others["building"] = {"building": centred, "bases": lambda: ["grpo"]}
    for name, module in others.items():
        monkeypatch.setitem(ESTIMATORS, name, name)
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**module))
    assert bases() == [*sorted({*BUILT_IN, *ROWS} - {"hadw"}), "raw", "centred"]
    for base in ("hadw", "broken", "building"):
        with pytest.raises(ConfigurationError, match=facts("algorithm.hadw.base", repr(base), "'centred', 'compose'")):
            build("hadw", Settings.parse({"hadw": {"base": base}}))
    with pytest.raises(
        ConfigurationError, match=facts("algorithm.hadw.base=raw", "must come after centre", "compares")
    ):
        build("hadw", Settings.parse({"hadw": {"base": "raw"}}))
    assert build("hadw", Settings.parse({"hadw": {"base": "centred"}})).stateful
    steps = ["weigh_and_sum", "centre"]
    on_list = {"hadw": {"base": "compose"}, "compose": {"steps": steps}}
    assert [step.name for step in build("hadw", Settings.parse(on_list)).steps] == [*steps, "weigh_by_history"]
    with pytest.raises(ConfigurationError, match="only once"):
        build("hadw", Settings.parse({**on_list, "compose": {"steps": [*steps, "weigh_by_history"]}}))


def test_a_division_of_each_reward_and_one_of_the_sum_are_two_things():
    assert composed({"step": "centre", "leave_one_out": True}, "weigh_and_sum", "centre", "scale_by_std").steps
    for first in (["divide_by_batch_std", "centre"], ["divide_by_mean", "centre"], ["centre", "scale_by_mad"]):
        assert composed(*first, "weigh_and_sum", "centre", "scale_by_std", "whiten").steps
