"""Measure on synthetic batches what the steps of a list do: a step or a setting without an effect is a mistake.

A list may name a step whose effect a later step cancels. For example, `center` removes what an earlier `center` did,
and a division by the group's standard deviation removes any factor of the group. No list of such pairs exists. Instead
the advantages of two synthetic batches are computed with the whole list, and again without each step, and with each
setting that is True set to False. If the advantages are the same, the step or the setting has no effect.

Only built-in steps are judged. A custom step such as a clip may rightly do nothing on synthetic data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import Chain, Step, apply_step
from verl_ext.core.groups import TOLERANCE, Array, Groups
from verl_ext.core.step_lists import is_built_in
from verl_ext.core.turns import Turns
from verl_ext.errors import Finding

SAME = 1e-4
"""Advantages are the same if they differ by at most this fraction of the largest absolute advantage."""
GROUP_SIZES = (5, 4, 6, 3, 4, 4, 1)
"""Responses to each prompt of a synthetic batch."""
AGREEING = (1, 5)
"""The groups in which all rewards rise together. Of many rewards, two conflict in nearly every other response."""
CONSTANT = 4
"""The group in which no reward varies."""


def synthetic_batches(
    keys: Sequence[str], *, minimum: float = 0.0, per_turn: bool = False, rubric: bool = False
) -> tuple[Batch, Batch]:
    """Return two batches with everything that a built-in step reacts to.

    Groups of uneven size, one of them without variance and one of a single response. Rewards between `minimum` and
    `minimum + 1`, which conflict in some responses and agree in others, and of which the first varies in half of the
    groups only. Responses of different length, prompts of different accuracy. With `per_turn`, the first reward has one
    number per turn. With `rubric`, the last reward has two criteria whose weights depend on the prompt.
    """
    first, second = (_synthetic_batch(seed, keys, minimum, per_turn=per_turn, rubric=rubric) for seed in (0, 1))
    return first, second


def _synthetic_batch(seed: int, keys: Sequence[str], minimum: float, *, per_turn: bool, rubric: bool) -> Batch:
    random = np.random.default_rng(seed)
    prompt = np.repeat(np.arange(len(GROUP_SIZES)), GROUP_SIZES)  # of each response
    names = [*keys]
    column_keys = [*keys]
    factors = None
    if rubric:
        names[-1:] = [f"{keys[-1]}[0]", f"{keys[-1]}[1]"]
        column_keys.append(keys[-1])
        factors = np.ones((len(prompt), len(names)))
        factors[:, -2] = (1 + prompt) / (2 + prompt)
        factors[:, -1] = 1 / (2 + prompt)
    rewards = random.random((len(prompt), len(names)))
    scales = np.linspace(0.5, 1.0, len(names))
    is_agreeing = np.isin(prompt, AGREEING)
    rewards[is_agreeing] = random.random((np.count_nonzero(is_agreeing), 1)) * scales
    rewards[prompt == CONSTANT] = scales
    rewards[prompt % 2 == 0, 0] = 0.5
    rewards += minimum
    accuracy = (random.random(len(prompt)) < (prompt + 1) / len(GROUP_SIZES)).astype(np.float64)
    first_response_of_prompt = np.cumsum(GROUP_SIZES) - GROUP_SIZES
    accuracy[first_response_of_prompt] = 0.0  # `weight_by_focal` removes a prompt that all responses solve
    turn_counts = random.integers(1, 4, len(prompt)) if per_turn else np.ones(len(prompt), dtype=np.intp)
    turns = Turns.of_counts(turn_counts, columns=(0,) if per_turn else ())
    response = np.repeat(np.arange(len(prompt)), turn_counts)  # of each row
    rewards = rewards[response]
    if per_turn:
        rewards[:, 0] += random.random(len(response))
    return Batch.of(
        rewards,
        prompt[response].tolist(),
        prompts=Groups.of(prompt[response].tolist()),
        turns=turns,
        keys=names,
        column_keys=column_keys,
        factors=None if factors is None else factors[response],
        lengths=random.integers(1, 9, len(response)).astype(np.float64),
        outputs=(turns.number == 0).astype(np.float64),
        accuracy=accuracy[response],
    )


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
    """Return whether other weights lead to other advantages. A chain without weights ignores none."""
    weights = chain.weights
    if weights is None:
        return True
    if len(weights) == 1:
        if weights[0] > 0:  # a division may cancel the only weight, and this is not a mistake
            return True
        return not _are_same_with(chain, (1.0,), weights, batches)
    favors_first = (1.0, *(0.1,) * (len(weights) - 1))
    favors_last = favors_first[::-1]
    return not _are_same_with(chain, favors_first, favors_last, batches)


def _are_same_with(chain: Chain, first: tuple[float, ...], second: tuple[float, ...], batches: Sequence[Batch]) -> bool:
    advantages = [advantages_of(replace(chain, weights=weights), batches) for weights in (first, second)]
    return are_same(advantages[0], advantages[1])


def measure(steps: Sequence[Step], *, rewards: int, per_turn: bool = False, rubric: bool = False) -> Iterator[Finding]:
    """Yield a finding for each built-in step that gets values it cannot process, or that has no effect.

    `rewards` is the number of synthetic rewards, of which each has weight 1. Raise if the list fails on the batches.

    >>> from verl_ext.core.steps import Center, ScaleByStd, WeightedSum
    >>> [finding.text for finding in measure([Center(), ScaleByStd(), WeightedSum(), Center()], rewards=3)]
    ['Step 4 of the list, center, has no effect: the advantages are the same without it.']
    """
    steps = [step.for_rewards(rewards) for step in steps]
    batches = synthetic_batches([f"reward_{number}" for number in range(rewards)], per_turn=per_turn, rubric=rubric)
    expected = advantages_of(Chain(tuple(steps)), batches)
    for index, step in enumerate(steps):
        if not is_built_in(step):
            continue
        label = f"Step {index + 1} of the list, {step.name},"
        # The result of a custom step that comes later may hide an effect.
        custom_step_follows = not all(map(is_built_in, steps[index + 1 :]))
        severity: Literal["error", "warning"] = "warning" if custom_step_follows else "error"
        if step.needs_centered and not _gets_centered_values(steps, index, batches):
            yield Finding(
                "error",
                f"{label} divides values whose mean is not 0 in each group.",
                f"Move it directly behind center, or remove {step.name}.",
            )
        elif not step.sums and _is_same([*steps[:index], *steps[index + 1 :]], batches, expected):
            yield Finding(
                severity,
                f"{label} has no effect: the advantages are the same without it.",
                f"Remove {step.name}, or move it to another place in the list.",
            )
        for setting in _settings_that_are_true(step):
            changed = replace(step, **{setting: False})
            if _is_same([*steps[:index], changed, *steps[index + 1 :]], batches, expected):
                yield Finding(
                    severity,
                    f"{label} has {setting}=True, which has no effect: the advantages are the same with "
                    f"{setting}=False.",
                    f"Remove {setting}, or move {step.name} to another place in the list.",
                )


def _settings_that_are_true(step: Step) -> list[str]:
    return [item.name for item in dataclasses.fields(step) if getattr(step, item.name) is True]


def _is_same(steps: Sequence[Step], batches: Sequence[Batch], expected: Array) -> bool:
    """Return whether a changed list gives the expected advantages. A changed list that fails does not."""
    try:
        advantages = advantages_of(Chain(tuple(steps)), batches)
    except Exception:  # noqa: BLE001 - a custom step may raise anything
        return False
    return are_same(advantages, expected)


def _gets_centered_values(steps: Sequence[Step], index: int, batches: Sequence[Batch]) -> bool:
    """Return whether the values that reach a step have mean 0 in every group of the batches."""
    states = dict(Chain(tuple(steps)).init())
    for batch in batches:
        values = batch.returns
        for step in steps[:index]:
            result = apply_step(step, values, batch, states.get(step.name))
            values = result.values
            states[step.name] = result.state
        mean = batch.groups.mean(values)
        largest = np.fmax.reduce(np.abs(values), axis=None, initial=1.0)
        if (np.abs(mean) > TOLERANCE * largest).any():
            return False
    return True
