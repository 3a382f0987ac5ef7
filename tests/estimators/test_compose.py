"""Lists of steps: the same numbers as the named estimators, and the lists that are rejected."""

import json
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import NamedTuple

import pytest
from omegaconf import OmegaConf

from tests.estimators.estimator_variants import KEYS, VARIANTS
from tests.facts import facts, says
from verl_ext import ESTIMATORS, Center, Chain, Finding, Method, Settings, WeightedSum, build
from verl_ext.checks.dry_run import dry_run
from verl_ext.core.step_lists import STEPS, as_list
from verl_ext.errors import ConfigurationError
from verl_ext.methods import METHODS
from verl_ext.registry import possible_bases
from verl_ext.run import Run

MORE_VARIANTS = {
    "gdpo, mad": ("gdpo", KEYS | {"gdpo": {"scale": "mad", "whiten": "none"}}),
    "gdpo with epsilon": ("gdpo", KEYS | {"gdpo": {"epsilon": 1e-4}}),
    "gdpo without std": ("gdpo", KEYS | {"norm_adv_by_std_in_grpo": False}),
    "dgpo without weights": ("dgpo", KEYS | {"dgpo": {"dqw": False, "balance": "none"}}),
    "dgpo at a low temperature": ("dgpo", KEYS | {"dgpo": {"dqw_temp": 0.5}}),
    "dgpo with KL": ("dgpo", KEYS | {"use_kl_in_reward": True}),
    "hadw, fixed": ("hadw", KEYS | {"hadw": {"anchor": "fixed", "fixed_anchor": 0.5, "lambda_scale": 1.0}}),
    "hadw, window of 2": ("hadw", KEYS | {"hadw": {"base": "gdpo", "history_window": 2, "eta": 0.5, "eta_min": 0.0}}),
    "maxrl": ("maxrl", KEYS | {"maxrl": {"epsilon": 0.1}}),
}
ALL_VARIANTS = VARIANTS | MORE_VARIANTS


def composed(*steps, **algorithm) -> Chain:
    """Return the chain of a list of steps."""
    return build("compose", Settings.parse({"compose": {"steps": list(steps)}} | algorithm))


def findings_at_start_up(*steps, **algorithm) -> list[Finding]:
    """Return the findings for a list of steps that has been built."""
    settings = Settings.parse({"compose": {"steps": list(steps)}} | algorithm)
    run = Run("compose", settings, build("compose", settings), OmegaConf.create())
    return list(dry_run(run))


@pytest.mark.parametrize(("name", "config"), ALL_VARIANTS.values(), ids=ALL_VARIANTS.keys())
def test_the_list_of_a_named_estimator_is_that_estimator(name, config):
    chain = build(name, Settings.parse(config))
    steps = json.loads(json.dumps(as_list(chain)))
    common_settings = {"rewards", "norm_adv_by_std_in_grpo", "use_kl_in_reward"}
    algorithm = {key: value for key, value in config.items() if key in common_settings}
    assert composed(*steps, **algorithm) == chain


def test_every_step_occurs_in_the_list_of_an_estimator():
    """The step `length_penalty` occurs in a list of docs/pages/lists.md only, which tests/test_docs_lists.py tests."""
    used_steps = {"length_penalty"}
    for name, config in ALL_VARIANTS.values():
        chain = build(name, Settings.parse(config))
        used_steps.update(step.name for step in chain.steps)
    assert used_steps >= set(STEPS)  # an estimator may have steps that are not built in


SUMMED = ["weighted_sum", "center"]
SAW = {"step": "weight_by_variation", "min_values": [0.0]}
LEAVE_ONE_OUT = {"step": "center", "leave_one_out": True}
PENALTY = {"step": "length_penalty", "weight": 0.1}


class Case(NamedTuple):
    """A list of steps, and the words of the message about it."""

    steps: list
    words: tuple[str, ...]


def as_text(value: object) -> str | None:
    """Return a list of steps as the id of a test. pytest numbers the words of its message."""
    return json.dumps(value).replace('"', "") if isinstance(value, list) else None


def behind_sum(name: str) -> Case:
    """Return the case of a step behind the sum that needs the separate rewards."""
    words = ("steps[2]", f"{name} must come before the sum", f"Move {name} before weighted_sum")
    return Case([*SUMMED, name], words)


MISPLACED = [
    *map(behind_sum, ["drop_conflicts", "scale_by_common_std", "scale_by_correlation", "weight_by_density"]),
    Case(["drop_conflicts", "center", "weighted_sum"], ("steps[0]", "drop_conflicts", "must come after center")),
    Case(["weight_by_density", "center", "weighted_sum"], ("steps[0]", "weight_by_density", "must come after center")),
    Case(["weighted_sum", "weight_by_history"], ("steps[1]", "weight_by_history", "must come after center")),
    Case(["weighted_sum", SAW, "center"], ("steps[1]", "weight_by_variation must come before the sum")),
    Case([*SUMMED, PENALTY], ("steps[2]", "length_penalty must come before center", "Put center after length_penalty")),
    Case(["center", PENALTY, "weighted_sum"], ("steps[1]", "length_penalty must come before center")),
]

REPEATED = [
    Case([*SUMMED, "balance", "balance"], ("steps[3]", "balance occurs twice", "Remove one")),
    Case([*SUMMED, "weight_by_history", "weight_by_history"], ("steps[3]", "weight_by_history occurs twice")),
    Case(["center", "scale_by_std", "scale_by_std", "weighted_sum"], ("steps[2]", "scale_by_std occurs twice")),
    Case(["center", SAW, "scale_by_std", SAW, "weighted_sum"], ("steps[3]", "weight_by_variation occurs twice")),
]

NUMBER_OF_SUMS = [
    Case([], ("algorithm.compose.steps", "[weighted_sum,center,scale_by_std]", "verl_ext show gdpo")),
    Case(["center"], ("algorithm.compose.steps", "weighted_sum", "found 0")),
    Case([*SUMMED, "weighted_sum"], ("weighted_sum", "found 2")),
    Case(["center", "soft_min", "weighted_sum"], ("algorithm.compose.steps", "found 2")),
]

WRONG_SETTINGS = [
    Case(["weighted_sum", "length_penalty", "center"], ("steps[1]", "length_penalty needs the setting 'weight'")),
    Case([*SUMMED, {"step": "scale_by_std", "epsilom": 1}], ("scale_by_std", "'epsilom'", "did you mean 'epsilon'")),
    Case([*SUMMED, {"step": "balance", "over": "rows"}], ("balance.over", "'rows'", "'sequence', 'token'")),
    Case([{"step": "weighted_sum", "weights": [1]}, "center"], ("weighted_sum", "algorithm.rewards.weights")),
    Case(
        ["center", {"step": "drop_conflicts", "tau": 0.5}, "weighted_sum"],
        ("steps[1]", "tau=0.5", "conflict=hard", "conflict=snr"),
    ),
    Case([*SUMMED, {"step": "weight_by_focal", "gamma": -1}], ("weight_by_focal.gamma", "at least 0", "found -1")),
]


def malformed(entry: object) -> Case:
    """Return the case of a list with an entry that does not name a step."""
    return Case([entry, *SUMMED], ("steps[0]", "{step: name, setting: value}", f"found {entry!r}"))


NOT_A_STEP = [
    *map(malformed, [3, {"step": 3}, {"epsilon": 1}]),
    Case(
        ["centr", "weighted_sum"],
        ("steps[0]", "'centr'", "did you mean 'center'", "'balance'", "package.module:Class"),
    ),
    Case([{"step": "condition", "conditions": {}}, *SUMMED], ("steps[0]", "'condition'")),
    Case(["no.such.module:Step", *SUMMED], ("'no.such.module:Step'", "No module named 'no'", "PYTHONPATH")),
    Case(["verl_ext.core.steps:Whitten", *SUMMED], ("verl_ext.core.steps", "no attribute 'Whitten'")),
    Case(["verl_ext.core.chain:listed", *SUMMED], ("'verl_ext.core.chain:listed'", "verl_ext.Step")),
    Case(["verl_ext.core.steps:Center", *SUMMED], ("'center'", "'verl_ext.core.steps:Center'")),
]


@pytest.mark.parametrize(
    ("steps", "words"), [*MISPLACED, *REPEATED, *NUMBER_OF_SUMS, *WRONG_SETTINGS, *NOT_A_STEP], ids=as_text
)
def test_a_wrong_list_is_rejected_with_the_reason(steps, words):
    with pytest.raises(ConfigurationError, match=facts(*words)):
        composed(*steps)


NO_EFFECT = "no effect: without it, the advantages of synthetic batches are the same"
NOT_CENTERED = "gets values whose mean is not 0 in each group"


def canceled_factor(name: str) -> Case:
    """Return the case of a step that multiplies a group or the batch, before a division that cancels it."""
    return Case([*SUMMED, name, "scale_by_std"], ("Step 3", name, NO_EFFECT))


def canceled_division(first: str, last: str) -> Case:
    """Return the case of two divisions, of which the second cancels the first."""
    return Case(["weighted_sum", first, "center", last], ("Step 2", first, NO_EFFECT))


# A division by the standard deviation of the group cancels any factor of the group or of the batch.
CANCELED_BY_GROUP_STD = [
    *map(canceled_factor, ["balance", "weight_by_difficulty", "weight_by_focal", "whiten"]),
    canceled_division("divide_by_mean", "scale_by_std"),
    canceled_division("divide_by_mean", "scale_by_mad"),
    canceled_division("divide_by_batch_std", "scale_by_std"),
    canceled_division("divide_by_batch_std", "scale_by_mad"),
    Case([*SUMMED, "scale_by_mad", "scale_by_std"], ("Step 3", "scale_by_mad", NO_EFFECT)),
    Case([*SUMMED, "scale_by_std", "scale_by_mad"], ("Step 3", "scale_by_std", NO_EFFECT)),
    Case(["divide_by_mean", "center", "scale_by_std", "weighted_sum"], ("Step 1", "divide_by_mean", NO_EFFECT)),
    Case(["center", SAW, "scale_by_std", "weighted_sum"], ("Step 2", "weight_by_variation", NO_EFFECT)),
    Case(["center", "weight_by_density", "scale_by_std", "soft_min"], ("Step 2", "weight_by_density", NO_EFFECT)),
    Case(
        ["center", "scale_by_correlation", "weighted_sum", "scale_by_std"],
        ("Step 2", "scale_by_correlation", NO_EFFECT),
    ),
    Case(["weighted_sum", LEAVE_ONE_OUT, "scale_by_std"], ("Step 2", "leave_one_out=True", "no effect")),
]

# So do a division by the mean of the group and one by the standard deviation of the batch.
CANCELED_BY_OTHER_DIVISION = [
    Case(["weighted_sum", "balance", "divide_by_mean", "center"], ("Step 2", "balance", NO_EFFECT)),
    Case(["weighted_sum", "balance", "divide_by_batch_std", "center"], ("Step 2", "balance", NO_EFFECT)),
    Case(
        ["weighted_sum", "divide_by_batch_std", "divide_by_mean", "center"],
        ("Step 2", "divide_by_batch_std", NO_EFFECT),
    ),
    Case(["weighted_sum", "divide_by_batch_std", "center", "whiten"], ("Step 2", "divide_by_batch_std", NO_EFFECT)),
    Case([*SUMMED, "balance", "whiten"], ("Step 3", "balance", NO_EFFECT)),
]

DIVIDES_UNCENTERED_VALUES = [
    Case(
        ["weighted_sum", "scale_by_std"],
        ("Step 2", "scale_by_std", NOT_CENTERED, "Add center directly before scale_by_std"),
    ),
    Case([*SUMMED, "weight_by_history", "scale_by_std"], ("Step 4", "scale_by_std", NOT_CENTERED)),
    Case(["center", "drop_conflicts", "scale_by_mad", "weighted_sum"], ("Step 3", "scale_by_mad", NOT_CENTERED)),
]

NEEDS_ONE_VALUE = [
    Case(
        ["center", "weight_by_history", "weighted_sum", "center"],
        ("one value per row", "Put weighted_sum before weight_by_history"),
    ),
    Case([PENALTY, "weighted_sum", "center"], ("one value per row", "Put weighted_sum before length_penalty")),
    Case(["balance", "weighted_sum", "center"], ("one value per row", "Put weighted_sum before balance")),
]


@pytest.mark.parametrize(
    ("steps", "words"),
    [*CANCELED_BY_GROUP_STD, *CANCELED_BY_OTHER_DIVISION, *DIVIDES_UNCENTERED_VALUES, *NEEDS_ONE_VALUE],
    ids=as_text,
)
def test_a_list_that_cannot_work_or_has_a_step_without_effect_is_rejected_at_start_up(steps, words):
    """Each of these lists follows the rules on the order of its steps, so that it can be built."""
    (finding,) = findings_at_start_up(*steps, rewards={"keys": ["x"]})
    assert finding.severity == "error"
    assert says(finding, *words)


@pytest.mark.parametrize(
    "steps",
    [
        # A division of each reward and a division of the sum are different steps.
        ["divide_by_batch_std", "center", "weighted_sum", "scale_by_std", "whiten"],
        ["divide_by_mean", "center", "weighted_sum", "scale_by_std", "whiten"],
        ["center", "scale_by_mad", "weighted_sum", "scale_by_std", "whiten"],
        ["weighted_sum", "center", "divide_by_batch_std"],
        # The soft minimum depends on the size of the rewards.
        ["weight_by_focal", "soft_min", "divide_by_mean"],
    ],
    ids=as_text,
)
def test_a_valid_list_has_no_findings(steps):
    assert findings_at_start_up(*steps, rewards={"keys": ["x", "y", "z"]}) == []


@dataclass(frozen=True)
class BaseSettings:
    """Settings of a method that builds on another one."""

    base: str = "grpo"
    """Estimator that comes first."""


@pytest.fixture
def _custom_methods(monkeypatch):
    """Add methods of another package: a sum, a centered sum, one that has a base, and one that cannot be imported."""
    building = Method("a test", "builds on grpo", lambda _section, _settings: (), settings=BaseSettings, base="base")
    methods = {
        "raw": Method.from_steps("a test", "sums the rewards", (WeightedSum(),)),
        "centered": Method.from_steps("a test", "centers the sum", (WeightedSum(), Center())),
        "building": building,
        "broken": EntryPoint("broken", "no_such_package:METHOD", "verl_ext.estimators"),
    }
    for name, method in methods.items():
        monkeypatch.setitem(ESTIMATORS, name, method)


def hadw_on(base: str) -> Chain:
    """Return the chain of hadw on another estimator."""
    return build("hadw", Settings.parse({"hadw": {"base": base}}))


@pytest.mark.usefixtures("_custom_methods")
def test_hadw_builds_on_every_method_that_builds_on_no_other():
    assert possible_bases() == [*sorted(METHODS.keys() - {"hadw"}), "raw", "centered"]
    assert hadw_on("centered").stateful


@pytest.mark.usefixtures("_custom_methods")
@pytest.mark.parametrize("base", ["hadw", "broken", "building"])
def test_hadw_rejects_a_base_that_builds_on_another_or_cannot_be_imported(base):
    with pytest.raises(ConfigurationError, match=facts("algorithm.hadw.base", repr(base), "'centered', 'compose'")):
        hadw_on(base)


@pytest.mark.usefixtures("_custom_methods")
def test_hadw_rejects_a_base_that_does_not_center():
    words = ("algorithm.hadw.base=raw", "must come after center", "compares")
    with pytest.raises(ConfigurationError, match=facts(*words)):
        hadw_on("raw")


def hadw_on_list(*steps: str) -> Chain:
    """Return the chain of hadw on a list of steps."""
    return build("hadw", Settings.parse({"hadw": {"base": "compose"}, "compose": {"steps": list(steps)}}))


def test_hadw_builds_on_a_list_of_steps():
    chain = hadw_on_list("weighted_sum", "center")
    assert [step.name for step in chain.steps] == ["weighted_sum", "center", "weight_by_history"]


def test_hadw_rejects_a_list_of_steps_with_its_own_step():
    words = ("algorithm.hadw.base=compose", "weight_by_history occurs twice")
    with pytest.raises(ConfigurationError, match=facts(*words)):
        hadw_on_list("weighted_sum", "center", "weight_by_history")
