"""Lists of steps: the same numbers as the named estimators, and the lists that are rejected."""

import json
from dataclasses import dataclass
from importlib.metadata import EntryPoint

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
    """The step `length_penalty` occurs only in docs/pages/methods/more.md, which tests/test_docs_lists.py tests."""
    used_steps = {"length_penalty"}
    for name, config in ALL_VARIANTS.values():
        chain = build(name, Settings.parse(config))
        used_steps.update(step.name for step in chain.steps)
    assert used_steps >= set(STEPS)  # an estimator may have steps that are not built in


SUMMED = ["weighted_sum", "center"]
SAW = {"step": "weight_by_variation", "min_values": [0.0]}
LEAVE_ONE_OUT = {"step": "center", "leave_one_out": True}
PENALTY = {"step": "length_penalty", "weight": 0.1}


def as_text(value: object) -> str | None:
    """Return a list of steps as the id of a test. pytest numbers the words of its message."""
    return json.dumps(value).replace('"', "") if isinstance(value, list) else None


def rejected_lists(*cases: tuple[list, tuple[str, ...]]):
    """Parametrize a test with lists of steps, each with the words of the message about the list."""
    return pytest.mark.parametrize(("steps", "words"), cases, ids=as_text)


@rejected_lists(
    ([], ("algorithm.compose.steps", "[weighted_sum,center,scale_by_std]", "verl_ext show gdpo")),
    (["center"], ("algorithm.compose.steps", "weighted_sum", "found 0")),
    ([*SUMMED, "weighted_sum"], ("weighted_sum", "found 2")),
    (["center", "soft_min", "weighted_sum"], ("algorithm.compose.steps", "found 2")),
)
def test_a_list_without_exactly_one_sum_is_rejected(steps, words):
    with pytest.raises(ConfigurationError, match=facts(*words)):
        composed(*steps)


@rejected_lists(
    (["drop_conflicts", "center", "weighted_sum"], ("steps[0]", "drop_conflicts", "must come after center")),
    (["weight_by_density", "center", "weighted_sum"], ("steps[0]", "weight_by_density", "must come after center")),
    (["weighted_sum", "weight_by_history"], ("steps[1]", "weight_by_history", "must come after center")),
    (["weighted_sum", SAW, "center"], ("steps[1]", "weight_by_variation must come before the sum")),
    ([*SUMMED, PENALTY], ("steps[2]", "length_penalty must come before center", "Put center after length_penalty")),
    (["center", PENALTY, "weighted_sum"], ("steps[1]", "length_penalty must come before center")),
)
def test_a_step_in_a_wrong_place_is_rejected(steps, words):
    with pytest.raises(ConfigurationError, match=facts(*words)):
        composed(*steps)


@pytest.mark.parametrize("name", ["drop_conflicts", "scale_by_common_std", "scale_by_correlation", "weight_by_density"])
def test_a_step_that_needs_the_separate_rewards_is_rejected_after_the_sum(name):
    words = ("steps[2]", f"{name} must come before the sum", f"Move {name} before weighted_sum")
    with pytest.raises(ConfigurationError, match=facts(*words)):
        composed(*SUMMED, name)


@rejected_lists(
    ([*SUMMED, "balance", "balance"], ("steps[3]", "balance occurs twice", "Remove one")),
    ([*SUMMED, "weight_by_history", "weight_by_history"], ("steps[3]", "weight_by_history occurs twice")),
    (["center", "scale_by_std", "scale_by_std", "weighted_sum"], ("steps[2]", "scale_by_std occurs twice")),
    (["center", SAW, "scale_by_std", SAW, "weighted_sum"], ("steps[3]", "weight_by_variation occurs twice")),
)
def test_a_repeated_step_is_rejected(steps, words):
    with pytest.raises(ConfigurationError, match=facts(*words)):
        composed(*steps)


@rejected_lists(
    (["weighted_sum", "length_penalty", "center"], ("steps[1]", "length_penalty needs the setting 'weight'")),
    ([*SUMMED, {"step": "scale_by_std", "epsilom": 1}], ("scale_by_std", "'epsilom'", "did you mean 'epsilon'")),
    ([*SUMMED, {"step": "balance", "over": "rows"}], ("balance.over", "'rows'", "'sequence', 'token'")),
    ([{"step": "weighted_sum", "weights": [1]}, "center"], ("weighted_sum", "algorithm.rewards.weights")),
    (
        ["center", {"step": "drop_conflicts", "tau": 0.5}, "weighted_sum"],
        ("steps[1]", "tau=0.5", "conflict=hard", "conflict=snr"),
    ),
    ([*SUMMED, {"step": "weight_by_focal", "gamma": -1}], ("weight_by_focal.gamma", "at least 0", "found -1")),
)
def test_a_wrong_setting_of_a_step_is_rejected(steps, words):
    with pytest.raises(ConfigurationError, match=facts(*words)):
        composed(*steps)


@rejected_lists(
    (
        ["centr", "weighted_sum"],
        ("steps[0]", "'centr'", "did you mean 'center'", "'balance'", "package.module:Class"),
    ),
    ([{"step": "condition", "conditions": {}}, *SUMMED], ("steps[0]", "'condition'")),
    (["no.such.module:Step", *SUMMED], ("'no.such.module:Step'", "No module named 'no'", "PYTHONPATH")),
    (["verl_ext.core.steps:Whitten", *SUMMED], ("verl_ext.core.steps", "no attribute 'Whitten'")),
    (["verl_ext.core.chain:listed", *SUMMED], ("'verl_ext.core.chain:listed'", "verl_ext.Step")),
    (["verl_ext.core.steps:Center", *SUMMED], ("'center'", "'verl_ext.core.steps:Center'")),
)
def test_a_name_that_is_not_a_step_is_rejected(steps, words):
    with pytest.raises(ConfigurationError, match=facts(*words)):
        composed(*steps)


@pytest.mark.parametrize("entry", [3, {"step": 3}, {"epsilon": 1}], ids=str)
def test_an_entry_without_a_name_is_rejected(entry):
    words = ("steps[0]", "{step: name, setting: value}", f"found {entry!r}")
    with pytest.raises(ConfigurationError, match=facts(*words)):
        composed(entry, *SUMMED)


def assert_error_at_start_up(steps: list, *words: str) -> None:
    """Build a list, which follows the rules on the order of its steps, and find one error before the run starts."""
    (finding,) = findings_at_start_up(*steps, rewards={"keys": ["x"]})
    assert finding.severity == "error"
    assert says(finding, *words)


NO_EFFECT = "no effect: without it, the advantages of synthetic batches are the same"
NOT_CENTERED = "gets values whose mean is not 0 in each group"


@rejected_lists(
    ([*SUMMED, "balance", "scale_by_std"], ("Step 3", "balance")),
    ([*SUMMED, "weight_by_difficulty", "scale_by_std"], ("Step 3", "weight_by_difficulty")),
    ([*SUMMED, "weight_by_focal", "scale_by_std"], ("Step 3", "weight_by_focal")),
    ([*SUMMED, "whiten", "scale_by_std"], ("Step 3", "whiten")),
    ([*SUMMED, "scale_by_mad", "scale_by_std"], ("Step 3", "scale_by_mad")),
    ([*SUMMED, "scale_by_std", "scale_by_mad"], ("Step 3", "scale_by_std")),
    (["weighted_sum", "divide_by_mean", "center", "scale_by_std"], ("Step 2", "divide_by_mean")),
    (["weighted_sum", "divide_by_mean", "center", "scale_by_mad"], ("Step 2", "divide_by_mean")),
    (["weighted_sum", "divide_by_batch_std", "center", "scale_by_std"], ("Step 2", "divide_by_batch_std")),
    (["weighted_sum", "divide_by_batch_std", "center", "scale_by_mad"], ("Step 2", "divide_by_batch_std")),
    (["divide_by_mean", "center", "scale_by_std", "weighted_sum"], ("Step 1", "divide_by_mean")),
    (["center", SAW, "scale_by_std", "weighted_sum"], ("Step 2", "weight_by_variation")),
    (["center", "weight_by_density", "scale_by_std", "soft_min"], ("Step 2", "weight_by_density")),
    (["center", "scale_by_correlation", "weighted_sum", "scale_by_std"], ("Step 2", "scale_by_correlation")),
)
def test_a_factor_that_a_division_within_the_group_cancels_is_an_error(steps, words):
    assert_error_at_start_up(steps, *words, NO_EFFECT)


def test_leave_one_out_before_a_division_within_the_group_is_an_error():
    steps = ["weighted_sum", LEAVE_ONE_OUT, "scale_by_std"]
    assert_error_at_start_up(steps, "Step 2", "leave_one_out=True", "no effect")


@rejected_lists(
    (["weighted_sum", "balance", "divide_by_mean", "center"], ("Step 2", "balance")),
    (["weighted_sum", "balance", "divide_by_batch_std", "center"], ("Step 2", "balance")),
    (["weighted_sum", "divide_by_batch_std", "divide_by_mean", "center"], ("Step 2", "divide_by_batch_std")),
    (["weighted_sum", "divide_by_batch_std", "center", "whiten"], ("Step 2", "divide_by_batch_std")),
    ([*SUMMED, "balance", "whiten"], ("Step 3", "balance")),
)
def test_a_factor_of_the_batch_that_a_later_division_cancels_is_an_error(steps, words):
    assert_error_at_start_up(steps, *words, NO_EFFECT)


@rejected_lists(
    (["weighted_sum", "scale_by_std"], ("Step 2", "scale_by_std", "Add center directly before scale_by_std")),
    ([*SUMMED, "weight_by_history", "scale_by_std"], ("Step 4", "scale_by_std")),
    (["center", "drop_conflicts", "scale_by_mad", "weighted_sum"], ("Step 3", "scale_by_mad")),
)
def test_a_division_of_values_that_are_not_centered_is_an_error(steps, words):
    assert_error_at_start_up(steps, *words, NOT_CENTERED)


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        (["center", "weight_by_history", "weighted_sum", "center"], "weight_by_history"),
        ([PENALTY, "weighted_sum", "center"], "length_penalty"),
        (["balance", "weighted_sum", "center"], "balance"),
    ],
    ids=as_text,
)
def test_a_step_for_one_value_per_response_is_an_error_before_the_sum(steps, name):
    assert_error_at_start_up(steps, "one value per row", f"Put weighted_sum before {name}")


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
    raw = Method.from_steps("a test", "sums the rewards", (WeightedSum(),))
    centered = Method.from_steps("a test", "centers the sum", (WeightedSum(), Center()))
    building = Method(
        "a test", "builds on grpo", lambda _section, _settings: (), settings=BaseSettings, base_setting="base"
    )
    broken = EntryPoint("broken", "no_such_package:METHOD", "verl_ext.estimators")
    methods = {"raw": raw, "centered": centered, "building": building, "broken": broken}
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
def test_hadw_rejects_a_base_with_a_base_or_an_import_error(base):
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
