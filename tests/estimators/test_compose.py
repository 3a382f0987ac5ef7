"""Lists of steps: the same numbers as the named estimators, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import rollouts
from tests.calls import call
from tests.estimators.every import EVERY, KEYS, components, started
from verl_ext import RunState, Settings, Step, build
from verl_ext.core.chain import Chain
from verl_ext.core.steps import WeighAndSum
from verl_ext.errors import ConfigurationError
from verl_ext.estimators.compose import STEPS, describe, try_out

MORE = [
    ("gdpo", KEYS | {"gdpo": {"scale": "mad", "whiten": "none"}}),
    ("gdpo", KEYS | {"gdpo": {"conditions": {"a": {"on": "b", "at_least": 0.5}}, "epsilon": 1e-4}}),
    ("gdpo", KEYS | {"norm_adv_by_std_in_grpo": False}),
    ("dgpo", KEYS | {"dgpo": {"dqw": False, "balance": "none"}}),
    ("dgpo", KEYS | {"dgpo": {"dqw_temp": 0.5}}),
    ("hadw", KEYS | {"hadw": {"anchor": "fixed", "fixed_anchor": 0.5, "lambda_scale": 1.0}}),
    ("hadw", KEYS | {"hadw": {"base": "gdpo", "history_window": 2, "eta": 0.5, "eta_min": 0.0}}),
]


def list_of(name, config):
    """The configuration that is a list of the named estimator's steps."""
    steps = json.loads(json.dumps(describe(build(name, Settings.parse(config)))))
    shared = {key: config[key] for key in ("rewards", "norm_adv_by_std_in_grpo") if key in config}
    return shared | {"compose": {"steps": steps}}


def same_in_three_batches(name, config, batches):
    own, composed = started(config), RunState()
    composed.states = {"compose": dict(own.states["hadw"])} if name == "hadw" else {}
    if name == "hadw" and config.get("hadw", {}).get("anchor") == "fixed":
        own, composed = RunState(), RunState()
    for rollout in batches:
        fields = {"components": components(rollout)}
        zeros = [0.0] * len(rollout.uids)
        wanted = call(name, zeros, rollout.uids, rollout.lengths, config=config, state=own, **fields)
        found = call(
            "compose", zeros, rollout.uids, rollout.lengths, config=list_of(name, config), state=composed, **fields
        )
        np.testing.assert_array_equal(found.tensor.numpy(), wanted.tensor.numpy())
        assert composed.states["compose"] == own.states[name]


@EVERY
@given(batches=st.lists(rollouts(), min_size=3, max_size=3))
def test_a_named_estimator_and_its_list_give_the_same_bits(name, config, batches):
    same_in_three_batches(name, config, batches)


@pytest.mark.parametrize(("name", "config"), MORE)
@given(batches=st.lists(rollouts(), min_size=3, max_size=3))
def test_so_do_lists_with_settings(name, config, batches):
    same_in_three_batches(name, config, batches)


def test_every_step_stands_in_the_list_of_some_estimator():
    used = {step.name for name, config in MORE for step in build(name, Settings.parse(config)).steps}
    assert used == set(STEPS)


def composed(*steps, **algorithm):
    return build("compose", Settings.parse({"compose": {"steps": list(steps)}} | algorithm))


SUMMED = ["weigh_and_sum", "centre"]
WRONG = [
    ([], "needs a list of steps"),
    (["centr", "weigh_and_sum"], r"steps\[0\]: unknown step 'centr' \(did you mean 'centre'\?\); valid: 'balance'"),
    (["centre"], "has no weigh_and_sum: put it first"),
    (["weigh_and_sum", "scale_by_std"], r"steps\[1\]: scale_by_std must (?!not).*after centre, because"),
    (["whiten", "weigh_and_sum"], "whiten must (?!not).*after weigh_and_sum, because"),
    (["balance", *SUMMED], "balance must (?!not).*after weigh_and_sum, because"),
    (["weigh_by_difficulty", *SUMMED], "weigh_by_difficulty must (?!not).*after weigh_and_sum, because"),
    ([*SUMMED, "weigh_and_sum"], "weigh_and_sum must not .*after weigh_and_sum, because"),
    ([*SUMMED, "balance", "scale_by_mad"], "scale_by_mad must not .*after balance, because"),
    ([*SUMMED, "weigh_by_difficulty", "scale_by_std"], "must not .*after weigh_by_difficulty, because"),
    ([*SUMMED, "weigh_by_history", "scale_by_std"], "must not .*after weigh_by_history, because"),
    ([*SUMMED, "whiten", "scale_by_std"], "must not .*after whiten, because"),
    (["weigh_and_sum", "weigh_by_history"], "weigh_by_history must (?!not).*after centre, because"),
    (["centre", "weigh_by_history", "weigh_and_sum"], "weigh_by_history must (?!not).*after weigh_and_sum, because"),
    ([*SUMMED, "scale_by_std", "scale_by_mad"], "scale_by_mad must not .*after a division by the group's spread"),
    ([*SUMMED, "balance", "balance"], "balance must not .*after balance: .*remove one"),
    ([*SUMMED, "whiten", "whiten"], "whiten must not .*after whiten: .*remove one"),
    ([*SUMMED, "weigh_by_difficulty", "weigh_by_difficulty"], "must not .*after weigh_by_difficulty: .*remove one"),
    ([":Step", *SUMMED], "':Step' .* write package.module:Class"),
    ([*SUMMED, "balance", "whiten"], "whiten must not .*after balance, because"),
    (
        [*SUMMED, {"step": "condition", "conditions": {"a": {"on": "b", "at_least": 1}}}],
        "condition must not .*after weigh_and_sum, because",
    ),
    ([*SUMMED, "weigh_by_history", "weigh_by_history"], "must not .*after weigh_by_history: .*remove one"),
    ([*SUMMED, {"step": "scale_by_std", "epsilom": 1}], r"unknown setting 'epsilom' \(did you mean 'epsilon'\?\)"),
    ([*SUMMED, {"step": "scale_by_std", "epsilon": -1}], r"\(scale_by_std\).epsilon must be above 0, found -1"),
    ([*SUMMED, {"step": "scale_by_std", "epsilon": 0}], r"\(scale_by_std\).epsilon must be above 0, found 0"),
    ([*SUMMED, {"step": "scale_by_mad", "epsilon": 0}], r"\(scale_by_mad\).epsilon must be above 0, found 0"),
    ([*SUMMED, {"step": "whiten", "epsilon": 0}], r"\(whiten\).epsilon must be above 0, found 0"),
    ([*SUMMED, {"step": "whiten", "epsilon": 1, "over": "token"}], "epsilon has no effect with over=token"),
    ([*SUMMED, {"step": "scale_by_std", "epsilon": "x"}], "epsilon must be a finite number, found 'x'"),
    ([*SUMMED, {"step": "balance", "over": "rows"}], "unknown value 'rows'.*; valid: 'sequence', 'token'"),
    ([*SUMMED, {"step": "weigh_by_difficulty", "dqw_temp": 0}], "dqw_temp must be above 0"),
    ([*SUMMED, {"step": "weigh_by_history", "history_window": 1.5}], "history_window must be an integer, found 1.5"),
    ([*SUMMED, {"step": "weigh_by_history", "history_window": 0}], "window must be at least 1"),
    (
        [*SUMMED, {"step": "weigh_by_history", "anchor": "fixed", "fixed_anchor": 0.5, "eta": 0.5}],
        "eta=0.5 has no effect with anchor=fixed",
    ),
    (
        [*SUMMED, {"step": "weigh_by_history", "anchor": "fixed"}],
        "anchor=fixed needs fixed_anchor",
    ),
    ([*SUMMED, {"step": "weigh_by_history", "fixed_anchor": 0.5}], "fixed_anchor=0.5 has no effect with anchor=soft"),
    ([{"step": "weigh_and_sum", "weights": [1]}, "centre"], "weigh_and_sum .*algorithm.rewards.weights"),
    ([{"step": "condition"}, *SUMMED], "it needs conditions="),
    (
        [{"step": "condition", "conditions": {"a": {"on": "a", "at_least": 1}}}, *SUMMED],
        "conditions.a.on must name another reward",
    ),
    ([{"step": "condition", "conditions": {"a": {"on": "b"}}}, *SUMMED], "conditions.a needs the setting 'at_least'"),
    ([3, *SUMMED], r"steps\[0\] must be a step's name, or \{step: name"),
    ([{"epsilon": 1}, *SUMMED], r"steps\[0\] must be a step's name, or \{step: name"),
    (["no.such.module:Step", *SUMMED], r"'no.such.module' of 'no.such.module:Step' cannot be imported: No module"),
    (
        ["verl_ext.core.steps:Whitten", *SUMMED],
        r"unknown step of verl_ext.core.steps 'Whitten' \(did you mean 'Whiten'",
    ),
    (["verl_ext.core.steps:divide", *SUMMED], "verl_ext.core.steps:divide"),
    (["verl_ext.core.steps:Centre", *SUMMED], "'centre' .*rename 'verl_ext.core.steps:Centre'"),
]


def test_a_module_that_raises_is_said_to(tmp_path, monkeypatch):
    (tmp_path / "raises_at_import.py").write_text('raise RuntimeError("on purpose")')
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match="'raises_at_import' .* raises RuntimeError when it is imported: on p"):
        composed("raises_at_import:Step", *SUMMED)


@pytest.mark.parametrize(("steps", "message"), WRONG, ids=[str(index) for index in range(len(WRONG))])
def test_a_wrong_list_is_refused_with_the_reason(steps, message):
    with pytest.raises(ConfigurationError, match=message):
        composed(*steps)


@pytest.mark.parametrize("steps", ["centre", {"centre": 1}, 3])
def test_what_is_no_list_is_refused(steps):
    with pytest.raises(ConfigurationError, match=r"algorithm\.compose\.steps must be a list"):
        Settings.parse({"compose": {"steps": steps}})


def test_settings_that_the_list_cannot_honour_are_refused():
    with pytest.raises(ConfigurationError, match="use_kl_in_reward=True cannot be honoured"):
        composed("centre", "weigh_and_sum", use_kl_in_reward=True)
    assert composed(*SUMMED, use_kl_in_reward=True).steps
    with pytest.raises(ConfigurationError, match="norm_adv_by_std_in_grpo=False contradicts scale_by_std"):
        composed(*SUMMED, "scale_by_std", norm_adv_by_std_in_grpo=False)


def test_a_condition_from_a_file_in_which_on_is_a_boolean():
    (condition, *_) = composed(
        {"step": "condition", "conditions": {"a": {True: "b", "at_least": 1}}}, *SUMMED, rewards={"keys": ["a", "b"]}
    ).steps
    assert (condition.conditions["a"].on, condition.conditions["a"].at_least) == ("b", 1.0)


def test_accuracy_is_read_as_for_the_named_estimators():
    config = {
        "compose": {"steps": [*SUMMED, "weigh_by_difficulty"]},
        "rewards": {"accuracy_key": "right", "accuracy_threshold": 0},
    }
    fields = {"right": np.array([1.0, -1, 1, 1, -1, -1]), "other": np.zeros(6)}
    found = call("compose", [1.0, 0, 1, 0, 1, 0], list("aabbcc"), config=config, components=fields).rows
    # Accuracies 0.5, 1 and 0, the last weighed as 1; T = 2.
    odds = np.exp(-np.array([0.5, 1.0, 1.0]) / 2)
    wanted = np.repeat(3 * odds / odds.sum(), 2) * np.array([0.5, -0.5] * 3)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_a_step_that_writes_into_its_input_is_refused_when_it_is_tried():
    class Doubles(Step):
        name = "doubles"

        def apply(self, values, batch):
            values *= 2
            return values

    complaint = try_out(Chain((Doubles(), WeighAndSum())), Settings())
    assert "step 'doubles'" in complaint
    assert "read-only" in complaint
