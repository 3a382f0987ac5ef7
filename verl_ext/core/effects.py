"""Measure on synthetic batches what the steps of a list do: a step or a setting without an effect is a mistake.

A list may name a step whose effect a later step cancels. For example, `center` removes what an earlier `center` did,
and a division by the group's standard deviation removes any factor of the group. No list of such pairs exists. Instead
the advantages of two synthetic batches are computed with the whole list, and again without each step, and with each
setting that is True set to False. If the advantages are the same, the step or the setting has no effect.

Only built-in steps must have an effect. A custom step such as a clip may rightly do nothing on synthetic data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain, Step
from verl_ext.core.groups import Array, Index
from verl_ext.core.step_lists import is_built_in, is_custom
from verl_ext.core.steps import Center, WeightedSum, means_are_zero
from verl_ext.core.turns import Turns
from verl_ext.errors import Finding

SAME = 1e-4
"""Advantages are the same if they differ by at most this fraction of the largest absolute advantage."""
GROUP_SIZES = (5, 4, 6, 5, 3, 4, 1)
"""Responses to each prompt of a synthetic batch."""
PROMPT_OF_RESPONSE = np.repeat(np.arange(len(GROUP_SIZES)), GROUP_SIZES)
AGREEING = (1, 3)
"""The groups in which all rewards rise together, so that few of their responses conflict even with many rewards."""
CONSTANT = 5
"""The group in which no reward varies."""
FIRST_REWARD_CONSTANT = (0, 4)
"""The groups in which the first reward does not vary, although other rewards do."""
NUMBER_OF_REWARDS = 3
"""Number of synthetic rewards with which lists are measured. With one reward many steps have no effect."""


def synthetic_batches(
    keys: Sequence[str], *, minimum: float = 0.0, per_turn: bool = False, rubric: bool = False
) -> tuple[Batch, Batch]:
    """Return two batches with everything that a built-in step reacts to.

    Groups of uneven size, one of them without variance and one of a single response. Rewards between `minimum` and
    `minimum + 1`, which conflict in some responses and agree in others. The first reward varies in fewer groups than
    the others. Responses of different length, prompts of different accuracy below 1. With `per_turn`, the first reward
    has one number per turn. With `rubric`, the last reward has two criteria whose weights depend on the prompt.
    """
    columns = Columns.of(keys, rubric=rubric)
    batches = []
    for seed in (0, 1):
        random = np.random.default_rng(seed)
        rewards = minimum + _synthetic_rewards(random, len(columns.keys))
        batches.append(_synthetic_batch(random, columns, rewards, per_turn=per_turn))
    return batches[0], batches[1]


@dataclass(frozen=True)
class Columns:
    """The columns of a synthetic batch."""

    keys: tuple[str, ...]
    """`K` names, as in `Batch.keys`."""
    reward_of_column: tuple[str, ...]
    """`K` the reward of each column."""
    criterion_weights: Array | None
    """`[prompts, K]` the weight of each criterion within its rubric, or None without a rubric."""

    @classmethod
    def of(cls, keys: Sequence[str], *, rubric: bool) -> Columns:
        """Return one column per reward. With `rubric` the last reward has two columns."""
        if not rubric:
            return cls(tuple(keys), tuple(keys), None)
        *others, last = keys
        names = (*others, f"{last}[0]", f"{last}[1]")
        criterion_weights = np.ones((len(GROUP_SIZES), len(names)))
        first_weight = np.linspace(0.3, 0.7, len(GROUP_SIZES))  # of each prompt
        criterion_weights[:, -2] = first_weight
        criterion_weights[:, -1] = 1 - first_weight
        return cls(names, (*others, last, last), criterion_weights)

    def criterion_weights_of(self, prompt_of_segment: Index) -> Array | None:
        """Return `[N, K]` the criterion weights of each segment, or None without a rubric."""
        return None if self.criterion_weights is None else self.criterion_weights[prompt_of_segment]


def _synthetic_batch(random: np.random.Generator, columns: Columns, rewards: Array, *, per_turn: bool) -> Batch:
    """Return a batch of the rewards `[T, K]`."""
    responses = len(PROMPT_OF_RESPONSE)
    chance_of_correct = (PROMPT_OF_RESPONSE + 1) / len(GROUP_SIZES)
    is_correct = random.random(responses) < chance_of_correct
    first_response_of_prompt = np.unique(PROMPT_OF_RESPONSE, return_index=True)[1]
    is_correct[first_response_of_prompt] = False  # `weight_by_focal` removes a prompt without an incorrect response
    turns = Turns.of_counts([1] * responses)
    if per_turn:
        turns = Turns.of_counts(random.integers(1, 4, responses), columns=(0,))
    # From here on the arrays have an entry per segment, which is a turn. Without `per_turn` it is a response.
    prompt_of_segment = PROMPT_OF_RESPONSE[turns.trajectory]
    rewards = rewards[turns.trajectory]
    if per_turn:
        rewards[:, 0] += random.random(len(rewards))
    lengths = random.integers(1, 9, len(rewards))
    is_first_turn = turns.number == 0  # with which the one output of a response begins
    return Batch.of(
        rewards,
        prompt_of_segment.tolist(),
        turns=turns,
        keys=columns.keys,
        reward_of_column=columns.reward_of_column,
        criterion_weights=columns.criterion_weights_of(prompt_of_segment),
        lengths=lengths.astype(np.float64),
        outputs=is_first_turn.astype(np.float64),
        accuracy=is_correct[turns.trajectory].astype(np.float64),
    )


def _synthetic_rewards(random: np.random.Generator, columns: int) -> Array:
    """Return `[T, K]` rewards in [0, 1]."""
    rewards = random.random((len(PROMPT_OF_RESPONSE), columns))
    scale_of_column = np.linspace(0.5, 1.0, columns)
    quality = random.random((len(PROMPT_OF_RESPONSE), 1))
    exponent_of_column = np.linspace(0.5, 2.0, columns)
    is_agreeing = np.isin(PROMPT_OF_RESPONSE, AGREEING)
    rewards[is_agreeing] = scale_of_column * quality[is_agreeing] ** exponent_of_column
    rewards[PROMPT_OF_RESPONSE == CONSTANT] = scale_of_column
    rewards[np.isin(PROMPT_OF_RESPONSE, FIRST_REWARD_CONSTANT), 0] = 0.5
    return rewards


def synthetic_batches_for(chain: Chain, keys: Sequence[str]) -> tuple[Batch, Batch]:
    """Return synthetic batches with rewards that no step of the chain rejects as too small."""
    return synthetic_batches(keys, minimum=max([0.0, *(step.min_reward for step in chain.steps)]))


def advantages_of(chain: Chain, batches: Sequence[Batch]) -> Array:
    """Return the advantages of batches that are computed one after the other, concatenated."""
    state: Any = None
    advantages = []
    for batch in batches:
        result = chain(batch, state)
        state = result.state
        advantages.append(result.advantages)
    return np.concatenate(advantages)


def are_same(first: Array, second: Array) -> bool:
    """Return whether two sets of advantages are the same up to the tolerance `SAME`.

    Edge case: advantages that are not finite are not the same as any others.
    """
    largest = max(np.abs(first).max(initial=0.0), np.abs(second).max(initial=0.0))
    if not np.isfinite(largest):
        return False
    return bool(np.abs(first - second).max(initial=0.0) <= SAME * largest)


def weights_matter(chain: Chain, batches: Sequence[Batch]) -> bool:
    """Return whether other weights lead to other advantages. True for a chain without weights."""
    weights = chain.weights
    if weights is None:
        return True
    if len(weights) == 1 and weights[0] > 0:  # a division may cancel the only weight, and this is not a mistake
        return True
    first = (1.0, *(0.1,) * (len(weights) - 1))
    second = weights if len(weights) == 1 else first[::-1]
    with_first = advantages_of(replace(chain, weights=first), batches)
    with_second = advantages_of(replace(chain, weights=second), batches)
    return not are_same(with_first, with_second)


@dataclass(frozen=True)
class _Measured:
    """A step of a list that is measured."""

    step: Step
    """The step that is applied to synthetic batches."""
    label: str
    """The place and the name of the step, for a finding."""
    is_custom: bool
    reads_fields: bool
    """Whether the step needs fields of verl's batch. Another step then replaces it, so its effect is not known."""

    @classmethod
    def of(cls, step: Step, number: int, rewards: int) -> _Measured:
        """Return the step with this number in the list, for this number of rewards."""
        applied = _without_fields(step.for_rewards(rewards))
        label = f"Step {number} of the list, {step.name},"
        return cls(applied, label, is_custom(step), bool(step.needs_fields))


def measure(
    steps: Sequence[Step], *, rewards: int = NUMBER_OF_REWARDS, per_turn: bool = False, rubric: bool = False
) -> list[Finding]:
    """Return a finding for each step that gets values it cannot process, and each built-in step that has no effect.

    There are `rewards` synthetic rewards of weight 1, whatever rewards a run has. Raise if the list fails on the
    batches. Synthetic batches lack the fields of verl's batch, so it is not known what a step with `needs_fields` does.
    In a list with such a step, other steps need not have an effect.

    >>> from verl_ext.core.steps import Center, ScaleByStd, WeightedSum
    >>> [finding.text for finding in measure([Center(), ScaleByStd(), WeightedSum(), Center()])]
    ['Step 4 of the list, center, has no effect: without it, the advantages of synthetic batches are the same.']
    """
    listed = [_Measured.of(step, number, rewards) for number, step in enumerate(steps, start=1)]
    keys = [f"reward_{number}" for number in range(rewards)]
    batches = synthetic_batches(keys, per_turn=per_turn, rubric=rubric)
    expected = advantages_of(_chain(listed), batches)
    effects_are_known = not any(measured.reads_fields for measured in listed)
    findings: list[Finding] = []
    # From the last step to the first. Of two steps of which either one is enough, the later one has no effect.
    later: list[_Measured] = []  # the later steps that have an effect
    for index in reversed(range(len(listed))):
        measured = listed[index]
        before = listed[:index]
        not_centered = _check_centered(measured, before, batches)
        if not_centered is not None:
            findings.insert(0, not_centered)
        if effects_are_known and not measured.is_custom and not measured.step.sums:
            # The result of a custom step that comes later may hide an effect.
            has_custom_step = any(step.is_custom for step in listed[index + 1 :])
            comparison = _Comparison(before, later, batches, expected, "warning" if has_custom_step else "error")
            no_effect = comparison.check_step(measured) if not_centered is None else None
            if no_effect is not None:
                findings.insert(0, no_effect)
                continue
            for finding in comparison.check_settings(measured):
                findings.insert(0, finding)
        later = [measured, *later]
    return findings


def _check_centered(measured: _Measured, before: Sequence[_Measured], batches: Sequence[Batch]) -> Finding | None:
    """Report a step that needs centered values, if the steps before it do not return such values."""
    if not measured.step.needs_centered or _give_centered_values(_chain(before), batches):
        return None
    name = measured.step.name
    has_center = any(earlier.step.centers for earlier in before)
    place = "Move it directly behind center" if has_center else f"Add center directly before {name}"
    gets_unknown_values = any(earlier.reads_fields for earlier in before)
    return Finding(
        "warning" if gets_unknown_values else "error",
        f"{measured.label} needs centered values, but gets values whose mean is not 0 in each group.",
        f"{place}, or remove {name}.",
    )


@dataclass(frozen=True)
class _Comparison:
    """Compares the advantages of a list with those of the list without a step, or with a changed step."""

    before: Sequence[_Measured]
    """The steps before the step that is left out or changed."""
    after: Sequence[_Measured]
    """The steps after it. Steps without an effect are already left out."""
    batches: Sequence[Batch]
    expected: Array
    """The advantages of the whole list."""
    severity: Literal["error", "warning"]
    """The severity of the findings."""

    def check_step(self, measured: _Measured) -> Finding | None:
        """Report a step without which the advantages are the same."""
        if not self._are_expected([*self.before, *self.after]):
            return None
        return Finding(
            self.severity,
            f"{measured.label} has no effect: without it, the advantages of synthetic batches are the same.",
            f"Remove {measured.step.name}, or move it to another place in the list.",
        )

    def check_settings(self, measured: _Measured) -> Iterator[Finding]:
        """Report each setting that is True, if the advantages are the same with False."""
        for setting in _settings_that_are_true(measured.step):
            changed_step = replace(measured.step, **{setting: False})
            changed = replace(measured, step=changed_step)
            is_without_effect = self._are_expected([*self.before, changed, *self.after])
            if is_without_effect:
                yield Finding(
                    self.severity,
                    f"{measured.label} has {setting}=True, which has no effect: with {setting}=False, the advantages "
                    "of synthetic batches are the same.",
                    f"Remove {setting}, or move {measured.step.name} to another place in the list.",
                )

    def _are_expected(self, changed: Sequence[_Measured]) -> bool:
        """Return whether a changed list gives the expected advantages. A list that fails does not."""
        try:
            advantages = advantages_of(_chain(changed), self.batches)
        except Exception:  # noqa: BLE001 - a custom step may raise anything
            return False
        return are_same(advantages, self.expected)


def _chain(listed: Sequence[_Measured]) -> Chain:
    return Chain(tuple(measured.step for measured in listed))


@dataclass(frozen=True)
class _Unchanged(Step):
    """Returns the values as they are, instead of a custom step that needs fields of verl's batch."""

    name: ClassVar[str] = "unchanged"

    def apply(self, values: Array, batch: Batch) -> Array:
        return values


def _without_fields(step: Step) -> Step:
    """Return the step, or a built-in step that resembles a step which needs fields of verl's batch."""
    if not step.needs_fields:
        return step
    if step.sums:
        return WeightedSum()
    return Center() if step.centers else _Unchanged()


def _settings_that_are_true(step: Step) -> list[str]:
    """Return the settings of a built-in step that are True."""
    if not is_built_in(step):
        return []
    return [item.name for item in dataclasses.fields(step) if getattr(step, item.name) is True]


def _give_centered_values(chain: Chain, batches: Sequence[Batch]) -> bool:
    """Return whether the values after the steps of a chain have mean 0 in every group of the batches."""
    states = dict(chain.init())
    for batch in batches:
        values = batch.returns
        for step, result in chain.results(batch, states):
            values = result.values
            states[step.name] = result.state
        if not means_are_zero(batch.groups.mean(values), values):
            return False
    return True
