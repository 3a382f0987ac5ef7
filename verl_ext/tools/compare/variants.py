"""Read the variants, which are estimators with their settings, and compute their advantages."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from verl_ext.core.batch import SCORE, Batch, unit_accuracy
from verl_ext.core.chain import Chain
from verl_ext.core.effects import measure, synthetic_batches_for, weights_matter
from verl_ext.core.groups import Array, Index
from verl_ext.core.rubrics import Criteria, to_columns
from verl_ext.core.turns import Turns
from verl_ext.errors import ConfigurationError, listed
from verl_ext.registry import ADDED_ESTIMATORS, build
from verl_ext.settings import RewardsSettings, Settings
from verl_ext.tools.arguments import parse_settings
from verl_ext.tools.compare.rollouts import TOKENS, Rollouts

GRPO = "grpo"
COMPOSE = "compose"
UNUSED = tuple(f"algorithm.rewards.{name}=" for name in ("accuracy_between", "log", "rejected", "token_scores"))
"""Settings that have no effect on stored rollouts."""
_SPACE_BEFORE_SETTING = re.compile(r"\s+(?=[+~]*[\w.@/]+=)")
"""A space inside `[...]` or `{...}` is not followed by `KEY=`."""
_ROUNDING = 1e-4
"""Advantages that differ by less are equal: they are computed in float64, and recorded in float64 or float32."""


@dataclass(frozen=True)
class Variant:
    """An estimator with its settings."""

    name: str
    """The name of the estimator."""
    label: str
    """The name of the variant in tables: the user's argument."""
    settings: Settings
    chain: Chain


@dataclass(frozen=True)
class Outcome:
    """The advantages of a variant, and the sum of rewards from which they are computed."""

    variant: Variant
    advantages: Array
    contributions: Mapping[str, Array]
    """`[N]` what each reward adds to the sum."""
    total: Array
    """`[N]` the sum; NaN if the estimator does not form a sum of rewards."""
    notes: tuple[str, ...] = ()


class _Request(NamedTuple):
    """A variant as the user asks for it."""

    argument: str
    name: str
    overrides: list[str]


def parse(arguments: Sequence[str], rollouts: Rollouts) -> tuple[list[Variant], Settings]:
    """Return the variants, grpo on the score first, and the settings that all of them share.

    If a dump stores the settings of its run, they apply unless an argument overrides them.
    """
    requests, shared_overrides = _split(arguments)
    if not requests:
        raise ConfigurationError(
            f"compare needs at least one estimator to compare with grpo. Add one of {listed(ADDED_ESTIMATORS)}, or a "
            "list of steps such as '[weighted_sum,center]'."
        )
    _check_effect(shared_overrides)
    for request in requests:
        _check_effect(request.overrides)
    shared = settings_of(rollouts, shared_overrides)
    grpo_settings = Settings(norm_by_std=shared.norm_by_std)
    variants = [Variant(GRPO, GRPO, grpo_settings, build(GRPO, grpo_settings))]
    for request in requests:
        settings = settings_of(rollouts, [*shared_overrides, *request.overrides])
        variants.append(_variant(request, settings, rollouts))
    labels = [variant.label for variant in variants]
    duplicates = {label for label in labels if labels.count(label) > 1}
    if duplicates:
        raise ConfigurationError(
            f"The variant {listed(duplicates)} is listed twice. Remove one. compare always includes grpo on the score."
        )
    return variants, shared


def _split(arguments: Sequence[str]) -> tuple[list[_Request], list[str]]:
    """Split the arguments into variants and settings for all variants."""
    requests = []
    shared_overrides: list[str] = []
    for argument in arguments:
        first, *overrides = _SPACE_BEFORE_SETTING.split(argument.strip())
        before_bracket, _, _ = first.partition("[")
        if "=" in before_bracket:  # a setting such as KEY=[a,b], and not a list of steps
            shared_overrides += [first, *overrides]
        elif first.startswith("["):
            steps = f"algorithm.compose.steps={first}"
            requests.append(_Request(argument, COMPOSE, [steps, *overrides]))
        else:
            requests.append(_Request(argument, first, overrides))
    return requests, shared_overrides


def _check_effect(overrides: Sequence[str]) -> None:
    """Raise for settings that have no effect on stored rollouts."""
    for override in overrides:
        if override.lstrip("+").startswith(UNUSED):
            raise ConfigurationError(
                f"{override} has no effect in compare, because the rollouts are stored. Remove it."
            )


def _variant(request: _Request, settings: Settings, rollouts: Rollouts) -> Variant:
    """Return the variant with these settings; raise if it needs the names of rewards and has none."""
    chain = build(request.name, settings)
    keys = settings.rewards.keys
    if chain.per_reward and keys is None:
        raise ConfigurationError(
            f"{request.name} processes each reward separately, but algorithm.rewards.keys is not set. Add the argument "
            f"'algorithm.rewards.keys=[...]' with some of the rewards {listed(rollouts.rewards)}."
        )
    is_grpo_on_sum = request.argument == GRPO and keys is not None
    label = "grpo (sum)" if is_grpo_on_sum else request.argument
    return Variant(request.name, label, settings, chain)


def settings_of(rollouts: Rollouts, overrides: Sequence[str] = ()) -> Settings:
    """Return the settings of the run with some overrides. The KL term is off, because rollouts do not contain it.

    A list of steps may name code to import, so it is never taken from a file.
    """
    run = rollouts.run
    if run is None:
        return parse_settings(overrides)
    algorithm = {name: value for name, value in run.algorithm.items() if name != COMPOSE}
    settings = parse_settings(overrides, algorithm, run.loss_agg_mode)
    return replace(settings, kl_in_reward=False)


def compute_outcome(variant: Variant, rollouts: Rollouts) -> Outcome:
    """Compute the advantages update by update, because an estimator may carry state from one to the next."""
    named_keys = variant.settings.rewards.keys
    keys = named_keys or (rollouts.total_key,)
    trajectories = len(rollouts.table)
    advantages = np.zeros(trajectories)
    contributions = np.zeros((trajectories, len(keys)))
    total = np.full(trajectories, np.nan)
    state: Mapping[str, Any] = variant.chain.init()
    for rows, batch in _batches(variant, keys, rollouts):
        result = variant.chain(batch, state)
        state = result.state
        advantages[rows] = result.advantages
        if result.contributions is not None and result.total is not None:
            contributions[rows] = result.contributions
            total[rows] = result.total
    contribution_of_key = dict(zip(keys, contributions.T, strict=True))
    if named_keys is None:
        contribution_of_key = dict(rollouts.contributions)
    differences = _differences_from_run(variant, rollouts)
    comparison = _comparison_with_record(variant, rollouts, advantages)
    notes = tuple(f"{variant.label}: {note}" for note in (*differences, *comparison))
    return Outcome(variant, advantages, contribution_of_key, total, notes)


def _batches(variant: Variant, keys: Sequence[str], rollouts: Rollouts) -> Iterator[tuple[Index, Batch]]:
    """Yield the batch of each update, with the rows of its trajectories in the rollouts."""
    settings = variant.settings.rewards
    rewards: list[Array | Criteria] = []
    for key in keys:
        values = rollouts.reward(key, "algorithm.rewards.keys")
        rewards.append(rollouts.rubrics.get(key, values))
    per_turn_columns = _per_turn_columns(settings, keys, rollouts)
    accuracies = None
    if variant.chain.needs_accuracy:
        _, accuracies = accuracy(variant.settings, rollouts)
    uids = rollouts.table["uid"].to_numpy()
    for rows in rollouts.updates.values():
        columns = to_columns(keys, [reward[rows] for reward in rewards])
        counts = {name: values[rows] for name, values in rollouts.counts.items()}
        batch = Batch.of(
            labels=uids[rows].tolist(),
            conditions=settings.conditions,
            turns=Turns(rollouts.turns[rows], per_turn_columns, settings.turn_discount),
            accuracy=None if accuracies is None else accuracies[rows],
            **columns,
            **counts,
        )
        yield rows, batch


def _per_turn_columns(settings: RewardsSettings, keys: Sequence[str], rollouts: Rollouts) -> tuple[int, ...]:
    """Return the columns of the per-turn rewards of a dump; raise if a variant names others."""
    per_turn_of_run: Sequence[str] = ()
    if rollouts.run is not None:
        per_turn_of_run = settings_of(rollouts).rewards.per_turn or ()
    expected = [key for key in keys if key in per_turn_of_run]
    per_turn = settings.per_turn or ()
    if set(per_turn) != set(expected):
        recorded = f"only {listed(expected)}" if expected else "no reward"
        remedy = _list(expected) if expected else "null"
        raise ConfigurationError(
            f"algorithm.rewards.per_turn={_list(per_turn)} does not match the rollouts. Of the rewards {listed(keys)}, "
            f"{recorded} has one value per turn. Set algorithm.rewards.per_turn={remedy}."
        )
    return tuple(keys.index(key) for key in expected)


def _list(names: Sequence[str]) -> str:
    return f"[{','.join(names)}]"


def _differences_from_run(variant: Variant, rollouts: Rollouts) -> Iterator[str]:
    """Yield the reasons why the advantages of a variant may differ from those of a run."""
    chain = variant.chain
    if chain.stateful and len(rollouts.updates) > 1:
        yield (
            "The history of this estimator begins with these rollouts. The advantages of a run are the same only if "
            "the rollouts contain the run from its first step."
        )
    elif chain.stateful:
        yield (
            "This estimator has no history yet, because the rollouts are one batch. If they come from several training "
            "steps, add a column `step` with the step of each row."
        )
    by_tokens = any(getattr(step, "over", None) == "token" for step in chain.steps)
    if by_tokens and rollouts.length_unit != TOKENS:
        yield (
            "The advantages are approximate, because this estimator weights responses by their tokens, and the number "
            f"of tokens is not known. All responses have the same weight here. Add a column `{TOKENS}` with the number "
            "of response tokens."
        )
    if variant.name == COMPOSE:
        for finding in measure(chain.steps):
            if finding.severity == "error":
                yield f"{finding.text} A run with this list is rejected. {finding.fix}"
    if variant.settings.rewards.weights is not None and _ignores_weights(variant):
        yield (
            "algorithm.rewards.weights has no effect on this estimator, and verl_ext rejects a run that sets it. Set "
            "algorithm.rewards.weights=null for this variant."
        )


def _ignores_weights(variant: Variant) -> bool:
    keys = variant.settings.rewards.keys or (SCORE,)
    return not weights_matter(variant.chain, synthetic_batches_for(variant.chain, keys))


def _comparison_with_record(variant: Variant, rollouts: Rollouts, advantages: Array) -> Iterator[str]:
    """Yield whether the advantages equal those that the run recorded, if the variant is the run's estimator."""
    if rollouts.run is None or rollouts.run.estimator != variant.name:
        return
    recorded = rollouts.table["advantage"].to_numpy(float)
    difference = float(np.abs(advantages - recorded).max())
    relation = "equal" if difference < _ROUNDING else f"differ by up to {difference:.3g} from"
    yield f"This is the estimator of the run, and its advantages {relation} those that the run recorded."


def accuracy(settings: Settings, rollouts: Rollouts) -> tuple[str, Array]:
    """Return the name and the values in [0, 1] of the accuracy.

    If a dump stores the accuracy, and no setting names another, that is used. Otherwise it is the reward of
    `accuracy_key`, the reward `acc`, or the score if there is at most one reward.
    """
    rewards = settings.rewards
    rewards_of_run = settings_of(rollouts).rewards
    key_and_threshold = (rewards.accuracy_key, rewards.accuracy_threshold)
    is_accuracy_of_run = key_and_threshold == (rewards_of_run.accuracy_key, rewards_of_run.accuracy_threshold)
    if "accuracy" in rollouts.table and is_accuracy_of_run:
        return "accuracy", rollouts.table["accuracy"].to_numpy(float)
    key = rewards.accuracy_in(rollouts.rewards, score=rollouts.total_key)
    if key == rollouts.total_key and rewards.accuracy_key is None and len(rewards.keys or ()) > 1:
        raise ConfigurationError(
            "algorithm.rewards.accuracy_key is not set, and no reward is named 'acc', so the accuracy is not known. "
            f"Set algorithm.rewards.accuracy_key to one of {listed(rewards.keys or ())}. If the values of this reward "
            "are not in [0, 1], also set algorithm.rewards.accuracy_threshold."
        )
    values = rollouts.reward(key, "algorithm.rewards.accuracy_key")
    uids = rollouts.table["uid"].tolist()
    return key, unit_accuracy(values, uids, key=key, threshold=rewards.accuracy_threshold)
