"""Steps and settings without effect: all short lists of built-in steps, and named lists with their findings.

`measure` judges a list by its advantages on two synthetic batches. The tests of all short lists compare its verdicts
with the advantages on other random batches.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from tests.facts import facts, says
from verl_ext import Batch, Center, Chain, ConfigurationError, DataError, Finding, ScaleByStd, Settings, Step, build
from verl_ext.core.chain import apply_step
from verl_ext.core.effects import advantages_of, are_same, measure, synthetic_batches, weights_matter
from verl_ext.core.step_lists import STEPS, check_order, read_step
from verl_ext.methods import METHODS
from verl_ext.registry import possible_bases

Steps = tuple[Step, ...]

REQUIRED = {"weight_by_variation": {"min_values": [0.0, 0.0, 0.0]}, "length_penalty": {"weight": 0.5}}
"""Settings without a default, for three rewards."""
VARIANTS = [
    {"step": "center", "leave_one_out": True},
    {"step": "weight_by_density", "variant": "positive"},
    {"step": "whiten", "over": "token"},
]


def steps_of(entries) -> Steps:
    """Return the steps of a list in the configuration."""
    return tuple(read_step(entry, "steps") for entry in entries)


DEFAULTS = [{"step": name, **REQUIRED.get(name, {})} for name in STEPS]
BUILT_IN_STEPS = steps_of(DEFAULTS + VARIANTS)


def short_lists() -> Iterator[Steps]:
    """Yield every list of up to three built-in steps with exactly one sum."""
    sums = [step for step in BUILT_IN_STEPS if step.sums]
    other_steps = [step for step in BUILT_IN_STEPS if not step.sums]
    for count in range(3):
        for others in itertools.product(other_steps, repeat=count):
            for sum_index in range(count + 1):
                for sum_step in sums:
                    yield (*others[:sum_index], sum_step, *others[sum_index:])


@pytest.fixture(scope="module")
def findings_of() -> dict[Steps, list[Finding]]:
    """The findings for each short list whose order of steps is valid and that computes the synthetic batches."""
    findings = {}
    for steps in short_lists():
        try:
            check_order(steps, "steps")
            findings[steps] = list(measure(steps))
        except (ConfigurationError, DataError):
            continue
    return findings


def random_batch(seed: int) -> Batch:
    """Return groups of 2 to 8 responses with three rewards, each of which is constant in some of the groups.

    Every prompt has an incorrect response, as in the synthetic batches. `weight_by_focal` removes a prompt of which all
    responses are correct, and no later step cancels that.
    """
    random = np.random.default_rng(seed)
    group_sizes = random.integers(2, 9, 12)
    prompt = random.permutation(np.repeat(np.arange(12), group_sizes))  # of each response
    rewards = random.integers(0, 5, (len(prompt), 3)) / 4
    rewards[:, 1] = random.random(len(prompt)) < 0.4
    is_constant = (random.random((12, 3)) < 0.3)[prompt]
    rewards[is_constant] = 0.5
    is_correct = random.random(len(prompt)) < random.random(12)[prompt]
    accuracy = is_correct.astype(np.float64)
    first_response_of_prompt = np.unique(prompt, return_index=True)[1]
    accuracy[first_response_of_prompt] = 0.0
    lengths = random.integers(1, 50, len(prompt))
    return Batch.of(rewards, prompt.tolist(), keys="abc", lengths=lengths, accuracy=accuracy)


OTHER_BATCHES = [(random_batch(seed), random_batch(seed + 1)) for seed in (10, 20)]
"""Pairs of batches. A chain computes the second with the state after the first, as `weight_by_history` needs it."""


def advantages_on_other_batches(steps: Steps) -> list[np.ndarray]:
    """Return the advantages of each pair of batches."""
    return [advantages_of(Chain(steps), batches) for batches in OTHER_BATCHES]


def has_effect(steps: Steps, index: int, advantages: list[np.ndarray]) -> bool:
    """Return whether a list without one of its steps fails, or has other advantages."""
    try:
        without_step = advantages_on_other_batches((*steps[:index], *steps[index + 1 :]))
    except (ConfigurationError, DataError):
        return True
    return not all(itertools.starmap(are_same, zip(advantages, without_step, strict=True)))


def names(steps: Steps) -> str:
    """Return the names of the steps."""
    return ", ".join(step.name for step in steps)


def accepted_lists(findings_of: dict[Steps, list[Finding]]) -> list[Steps]:
    """Return the lists without findings."""
    return [steps for steps, findings in findings_of.items() if not findings]


def test_the_short_lists_contain_every_step_and_both_verdicts(findings_of):
    lists = list(short_lists())
    assert len(lists) > 2000
    assert {step.name for steps in lists for step in steps} == set(STEPS)
    accepted = accepted_lists(findings_of)
    assert len(accepted) > 300
    assert len(findings_of) - len(accepted) > 300


def test_every_step_of_an_accepted_list_has_an_effect_on_other_batches(findings_of):
    without_effect = []
    for steps in accepted_lists(findings_of):
        advantages = advantages_on_other_batches(steps)
        for index, step in enumerate(steps):
            if not step.sums and not has_effect(steps, index, advantages):
                without_effect.append(f"{step.name} in {names(steps)}")
    assert without_effect == []


def test_an_accepted_list_centers_values_for_each_step_that_needs_it(findings_of):
    not_centered = []
    batch = OTHER_BATCHES[0][0]
    for steps in accepted_lists(findings_of):
        state = Chain(steps).init()
        values = batch.returns
        for step in steps:
            mean = batch.groups.mean(values)
            if step.needs_centered and np.abs(mean).max() > 1e-6:
                not_centered.append(f"{step.name} in {names(steps)}")
            values = apply_step(step, values, batch, state.get(step.name)).values
    assert not_centered == []


def test_a_step_found_without_effect_has_none_on_other_batches(findings_of):
    with_effect = []
    for steps, findings in findings_of.items():
        for finding in findings:
            if says(finding.text, "without it, the advantages of synthetic batches are the same"):
                index = int(finding.text.split()[1]) - 1  # "Step 2 of the list"
                if has_effect(steps, index, advantages_on_other_batches(steps)):
                    with_effect.append(f"{steps[index].name} in {names(steps)}")
    assert with_effect == []


LEAVE_ONE_OUT = {"step": "center", "leave_one_out": True}


@pytest.mark.parametrize("per_turn", [False, True], ids=["per response", "per turn"])
@pytest.mark.parametrize("rubric", [False, True], ids=["rewards", "rubric"])
@pytest.mark.parametrize(
    ("entries", "words"),
    [
        pytest.param(
            ["center", "weighted_sum", "center"],
            ("Step 3", "center", "has no effect"),
            id="centering twice",
        ),
        pytest.param(
            ["weighted_sum", LEAVE_ONE_OUT, "scale_by_std"],
            ("Step 2", "leave_one_out=True", "has no effect", "Remove leave_one_out"),
            id="leave one out, then the standard deviation of the group",
        ),
        pytest.param(
            ["center", "soft_min", "scale_by_std"],
            ("Step 3", "scale_by_std", "mean is not 0", "behind center"),
            id="a soft minimum has no mean of 0",
        ),
        pytest.param(
            ["weighted_sum", "center", "weight_by_focal", "scale_by_std"],
            ("Step 3", "weight_by_focal", "has no effect"),
            id="focal weights, then the standard deviation of the group",
        ),
        pytest.param(
            ["weighted_sum", "center", "weight_by_difficulty", "scale_by_std"],
            ("Step 3", "weight_by_difficulty", "has no effect"),
            id="weights by difficulty, then the standard deviation of the group",
        ),
    ],
)
def test_a_list_with_a_step_without_effect_has_a_finding_for_the_step(entries, words, per_turn, rubric):
    (finding,) = measure(steps_of(entries), per_turn=per_turn, rubric=rubric)
    assert finding.severity == "error"
    assert says(finding, *words)


@pytest.mark.parametrize("centered", [["center"], []], ids=["centered", "not centered"])
@pytest.mark.parametrize(
    ("per_turn", "without_effect"), [(False, "divide_by_batch_std"), (True, "whiten")], ids=["per response", "per turn"]
)
def test_whitening_with_division_by_the_batch_std_leaves_one_without_effect(centered, per_turn, without_effect):
    """Per turn, `whiten` subtracts no mean and divides by another number than `divide_by_batch_std`.

    The second division then cancels the first. Otherwise both divide by the same number, so that the second one divides
    by 1, and without `center` only `whiten` subtracts the mean.
    """
    steps = steps_of(["weighted_sum", *centered, "whiten", "divide_by_batch_std"])
    (finding,) = measure(steps, per_turn=per_turn)
    assert finding.severity == "error"
    assert says(finding, without_effect, "has no effect")


def test_a_step_without_rubric_support_raises_only_for_a_rubric():
    steps = steps_of(["center", "drop_conflicts", "weighted_sum"])
    assert list(measure(steps)) == []
    with pytest.raises(ConfigurationError, match=facts("'drop_conflicts'", "does not support rubrics")):
        list(measure(steps, rubric=True))


@dataclass(frozen=True)
class Unchanged(Step):
    """A custom step that does nothing on these batches, as a clip may."""

    name: ClassVar[str] = "unchanged"
    is_strict: bool = True

    def apply(self, values, batch):
        return values


@dataclass(frozen=True)
class MyScale(ScaleByStd):
    """A custom step that does what a built-in step does."""

    name: ClassVar[str] = "my_scale"


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_a_custom_step_without_effect_has_no_finding(index):
    steps = list(steps_of(["center", "weighted_sum", "whiten"]))
    steps.insert(index, Unchanged())
    assert list(measure(steps)) == []


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["weighted_sum", "center", "balance"], ("Step 3", "balance", "has no effect")),
        (["weighted_sum", LEAVE_ONE_OUT], ("leave_one_out=True", "has no effect")),
    ],
    ids=["step", "setting"],
)
def test_a_built_in_step_before_a_custom_step_gets_only_a_warning(entries, words):
    """The custom step may depend on the built-in step in a way that the synthetic batches do not show."""
    (finding,) = measure([*steps_of(entries), MyScale()])
    assert finding.severity == "warning"
    assert says(finding, *words)


def test_a_built_in_step_after_a_custom_step_gets_an_error():
    before = steps_of(["weighted_sum", "center", "balance"])
    after = steps_of(["whiten", "whiten"])
    of_balance, of_second_whiten = measure([*before, MyScale(), *after])
    assert of_balance.severity == "warning"
    assert of_second_whiten.severity == "error"
    assert says(of_second_whiten, "Step 6", "whiten")


def test_a_list_that_fails_without_a_step_needs_the_step():
    @dataclass(frozen=True)
    class NeedsCentered(Step):
        name: ClassVar[str] = "needs_centered"

        def apply(self, values, batch):
            if (np.abs(batch.groups.mean(values)) > 1e-6).any():
                raise ValueError("not centered")
            return np.sign(values)

    assert list(measure([*steps_of(["weighted_sum", "center"]), NeedsCentered()])) == []


def methods_with_settings() -> Iterator[tuple[str, dict]]:
    """Yield each method that is not a list in the configuration, and `hadw` on each base, at the default settings."""
    for name in sorted(METHODS.keys() - {"compose", "hadw"}):
        yield name, {}
    for base in possible_bases():
        if base in METHODS and base != "compose":
            yield "hadw", {"hadw": {"base": base}}


METHODS_WITH_SETTINGS = list(methods_with_settings())
EVERY_METHOD = pytest.mark.parametrize(("name", "sections"), METHODS_WITH_SETTINGS, ids=map(str, METHODS_WITH_SETTINGS))


def chain_of(name: str, sections: dict) -> Chain:
    """Return the chain of a method, with the minimum values that `saw` requires."""
    return build(name, Settings.parse({"saw": REQUIRED["weight_by_variation"], **sections}))


@pytest.mark.parametrize("per_turn", [False, True])
@EVERY_METHOD
def test_every_step_of_a_built_in_method_has_an_effect(name, sections, per_turn):
    assert list(measure(chain_of(name, sections).steps, per_turn=per_turn)) == []


@pytest.mark.parametrize("per_turn", [False, True])
@EVERY_METHOD
def test_every_step_of_a_built_in_method_has_an_effect_on_rubrics(name, sections, per_turn):
    steps = chain_of(name, sections).steps
    steps_before_sum = itertools.takewhile(lambda step: not step.sums, steps)
    if any(step.not_with_rubrics for step in steps_before_sum):
        with pytest.raises(ConfigurationError, match="does not support rubrics"):
            list(measure(steps, per_turn=per_turn, rubric=True))
    else:
        assert list(measure(steps, per_turn=per_turn, rubric=True)) == []


@pytest.mark.parametrize("count", [2, 3, 12])
@EVERY_METHOD
def test_the_weights_of_the_rewards_matter_except_to_the_soft_minimum(name, sections, count):
    """Of twelve rewards, two conflict in nearly every response, except in the groups in which all rise together."""
    keys = [f"reward_{index}" for index in range(count)]
    min_values = {"saw": {"min_values": [0.0] * count}}
    chain = chain_of(name, {**sections, **min_values, "rewards": {"keys": keys, "weights": [2.0] * count}})
    batches = synthetic_batches(keys)
    has_soft_min = any(step.name == "soft_min" for step in chain.steps)
    assert weights_matter(chain, batches) == (not has_soft_min)


@pytest.mark.parametrize(
    ("entries", "weights", "matters"),
    [
        pytest.param(["weighted_sum", "center"], None, True, id="no weights are set that could have no effect"),
        pytest.param(["weighted_sum", "center"], (2.0,), True, id="single weight"),
        pytest.param(["weighted_sum", "center", "scale_by_std"], (2.0,), True, id="single weight, canceled"),
        pytest.param(["weighted_sum", "center"], (-1.0,), True, id="negative weight"),
        pytest.param(["soft_min", "center"], (-1.0,), False, id="negative weight, soft minimum"),
        pytest.param(["soft_min", "center"], (1.0, 2.0), False, id="soft minimum"),
        pytest.param(["center", "scale_by_common_std", "soft_min"], (1.0, 2.0), True, id="weights before soft minimum"),
    ],
)
def test_weights_matter_if_other_weights_lead_to_other_advantages(entries, weights, matters):
    count = 1 if weights is None else len(weights)
    batches = synthetic_batches([f"reward_{index}" for index in range(count)])
    assert weights_matter(Chain(steps_of(entries), weights), batches) == matters


@pytest.fixture(params=[False, True], ids=["per response", "per turn"])
def with_turns(request) -> bool:
    """Whether one of the rewards of the synthetic batches is per turn."""
    return request.param


@pytest.fixture(params=[False, True], ids=["rewards", "rubric"])
def with_rubric(request) -> bool:
    """Whether one of the rewards of the synthetic batches is a rubric."""
    return request.param


@pytest.fixture
def three_rewards(with_turns, with_rubric) -> list[Batch]:
    """The synthetic batches of three rewards of at least 2."""
    return list(synthetic_batches(["a", "b", "c"], minimum=2.0, per_turn=with_turns, rubric=with_rubric))


def test_synthetic_batches_have_turns_and_a_rubric_if_the_run_has_them(three_rewards, with_turns, with_rubric):
    for batch in three_rewards:
        assert batch.reward_names == ("a", "b", "c")
        assert len(batch.keys) == 3 + with_rubric
        weights_differ = bool(np.ptp(batch.weights, axis=0).any())
        assert weights_differ == with_rubric  # the weights of the criteria depend on the prompt
        assert (not batch.turns.last.all()) == with_turns
        assert batch.rewards.min() >= 2


def test_in_synthetic_batches_some_rewards_vary_in_fewer_groups(three_rewards):
    for batch in three_rewards:
        varies = batch.groups.varies(batch.returns)  # [groups, K]
        assert varies.any(axis=0).all()
        assert not varies.all(axis=1).all()
        assert len(set(varies.sum(axis=0))) > 1


def test_in_synthetic_batches_some_rewards_conflict(three_rewards):
    for batch in three_rewards:
        centered = Center().apply(batch.returns, batch)
        has_high_reward = (centered > 0.01).any(axis=1)
        has_low_reward = (centered < -0.01).any(axis=1)
        assert (has_high_reward & has_low_reward).any()


def test_in_synthetic_batches_lengths_and_accuracies_differ(three_rewards):
    for batch in three_rewards:
        assert len(set(batch.lengths)) > 1
        accuracy_of_prompt = batch.prompts.mean(batch.accuracy_for("weight_by_focal"))
        assert len(set(accuracy_of_prompt)) > 2
        assert accuracy_of_prompt.max() < 1


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        pytest.param([1000.0, -1.0, 0.0], [1000.09, -0.91, 0.09], True, id="below 1e-4 of the largest"),
        pytest.param([1000.0, -1.0, 0.0], [1000.11, -0.89, 0.11], False, id="above 1e-4 of the largest"),
        pytest.param([0.0, 0.0], [0.0, 0.0], True, id="zeros"),
        pytest.param([], [], True, id="empty"),
        pytest.param([np.inf], [np.inf], False, id="infinite"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_advantages_are_the_same_up_to_a_fraction_of_the_largest(one, other, same):
    assert are_same(np.array(one), np.array(other)) == same
