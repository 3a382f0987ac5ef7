"""Read the variants, estimators with their settings, and compute their advantages."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl_ext.core.batch import SCORE, Batch, unit_accuracy
from verl_ext.core.chain import Chain
from verl_ext.core.effects import measure, synthetic_batches_for, weights_matter
from verl_ext.core.groups import Array
from verl_ext.core.rubrics import to_columns
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
_SETTING = re.compile(r"\s+(?=[+~]*[\w.@/]+=)")
"""The space before a setting. A space inside `[...]` or `{...}` is not followed by `KEY=`."""
_ROUNDING = 1e-4
"""Advantages that differ by less are equal: they are computed in float64, and recorded in float64 or float32."""


@dataclass(frozen=True)
class Variant:
    """An estimator with its settings."""

    name: str
    """The name of the estimator."""
    text: str
    """The argument of the user, which the tables show."""
    settings: Settings
    chain: Chain


@dataclass(frozen=True)
class Outcome:
    """The advantages of a variant, and the sum of rewards from which they are made."""

    variant: Variant
    advantages: Array
    parts: Mapping[str, Array]
    """`[N]` the term of each reward in the sum."""
    total: Array
    """`[N]` the sum; NaN if the estimator does not form a sum of rewards."""
    notes: tuple[str, ...] = ()


def parse(arguments: Sequence[str], rollouts: Rollouts) -> tuple[list[Variant], Settings]:
    """Return the variants, grpo on the score first, and the settings that all of them share.

    If a dump stores the settings of its run, they apply unless an argument overrides them.
    """
    shared: list[str] = []
    named: list[tuple[str, list[str], str]] = []
    for argument in arguments:
        first, *overrides = _SETTING.split(argument.strip())
        if "=" in first.partition("[")[0]:
            shared += [first, *overrides]
        elif first.startswith("["):
            named.append((COMPOSE, [f"algorithm.compose.steps={first}", *overrides], argument))
        else:
            named.append((first, overrides, argument))
    if not named:
        raise ConfigurationError(
            f"compare needs at least one estimator to compare with grpo. Add one of {listed(ADDED_ESTIMATORS)}, or a "
            "list of steps such as '[weighted_sum,center]'."
        )
    for text in (*shared, *(text for _, overrides, _ in named for text in overrides)):
        if text.lstrip("+").startswith(UNUSED):
            raise ConfigurationError(f"{text} has no effect in compare, because the rollouts are stored. Remove it.")
    common = settings_of(rollouts, shared)
    plain = Settings(norm_by_std=common.norm_by_std)
    variants = [Variant(GRPO, GRPO, plain, build(GRPO, plain))]
    for name, overrides, text in named:
        settings = settings_of(rollouts, [*shared, *overrides])
        chain = build(name, settings)
        if chain.per_reward and settings.rewards.keys is None:
            raise ConfigurationError(
                f"{name} processes each reward separately, but algorithm.rewards.keys is not set. Add the argument "
                f"'algorithm.rewards.keys=[...]' with some of the rewards {listed(rollouts.rewards)}."
            )
        called = "grpo (sum)" if text == GRPO and settings.rewards.keys else text
        variants.append(Variant(name, called, settings, chain))
    texts = [variant.text for variant in variants]
    if twice := {text for text in texts if texts.count(text) > 1}:
        raise ConfigurationError(
            f"The variant {listed(twice)} is listed twice. Remove one. compare always includes grpo on the score."
        )
    return variants, common


def settings_of(rollouts: Rollouts, overrides: Sequence[str] = ()) -> Settings:
    """Return the settings of the run with some overrides. The KL term is off, because rollouts do not contain it.

    A list of steps may name code to import, so it is never taken from a file.
    """
    run = rollouts.run
    if run is None:
        return parse_settings(overrides)
    algorithm = {name: value for name, value in run.algorithm.items() if name != "compose"}
    return replace(parse_settings(overrides, algorithm, run.loss_agg_mode), kl_in_reward=False)


def outcome(variant: Variant, rollouts: Rollouts) -> Outcome:
    """Compute the advantages update by update, because an estimator may carry state from one to the next."""
    chain, rewards_settings = variant.chain, variant.settings.rewards
    keys = rewards_settings.keys or (rollouts.total,)
    rewards = [rollouts.rubrics.get(key, rollouts.reward(key, "algorithm.rewards.keys")) for key in keys]
    per_turn = _per_turn(rewards_settings, keys, rollouts)
    accuracies = accuracy(variant.settings, rollouts)[1] if chain.needs_accuracy else None
    uids = rollouts.table["uid"].to_numpy()
    state: Mapping[str, Any] = chain.init()
    advantages, total, parts = np.zeros(len(uids)), np.full(len(uids), np.nan), np.zeros((len(uids), len(keys)))
    for rows in rollouts.updates.values():
        batch = Batch.of(
            labels=uids[rows].tolist(),
            **to_columns(keys, [column[rows] for column in rewards]),
            conditions=rewards_settings.conditions,
            turns=Turns(rollouts.turns[rows], per_turn, rewards_settings.turn_discount),
            accuracy=None if accuracies is None else accuracies[rows],
            **{name: values[rows] for name, values in rollouts.counts.items()},
        )
        result = chain(batch, state)
        state, advantages[rows] = result.state, result.advantages
        if result.contributions is not None:
            parts[rows], total[rows] = result.contributions, result.total
    notes = [*_differences(variant, rollouts)]
    if rollouts.run is not None and rollouts.run.estimator == variant.name:
        difference = float(np.abs(advantages - rollouts.table["advantage"].to_numpy(float)).max())
        same = "equal" if difference < _ROUNDING else f"differ by up to {difference:.3g} from"
        notes.append(f"This is the estimator of the run, and its advantages {same} those that the run recorded.")
    notes = [f"{variant.text}: {text}" for text in notes]
    by_key = rollouts.parts if rewards_settings.keys is None else dict(zip(keys, parts.T, strict=True))
    return Outcome(variant, advantages, by_key, total, tuple(notes))


def _per_turn(settings: RewardsSettings, keys: Sequence[str], rollouts: Rollouts) -> tuple[int, ...]:
    """Return the places of the per-turn rewards of a dump; raise if a variant names others."""
    recorded = () if rollouts.run is None else settings_of(rollouts).rewards.per_turn or ()
    per_turn = [key for key in keys if key in recorded]
    if set(settings.per_turn or ()) != set(per_turn):
        recorded_text = f"only {listed(per_turn)}" if per_turn else "no reward"
        raise ConfigurationError(
            f"algorithm.rewards.per_turn={_list(settings.per_turn or ())} does not match the rollouts. Of the rewards "
            f"{listed(keys)}, {recorded_text} has one value per turn. Set algorithm.rewards.per_turn="
            f"{_list(per_turn) if per_turn else 'null'}."
        )
    return tuple(place for place, key in enumerate(keys) if key in recorded)


def _list(names: Sequence[str]) -> str:
    return f"[{','.join(names)}]"


def _differences(variant: Variant, rollouts: Rollouts) -> Iterator[str]:
    """Yield the reasons why the advantages of a variant may differ from those of a run."""
    chain, weights = variant.chain, variant.settings.rewards.weights
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
    if by_tokens and rollouts.unit != TOKENS:
        yield (
            "The advantages are approximate, because this estimator weights responses by their tokens, and the number "
            f"of tokens is not known. All responses have the same weight here. Add a column `{TOKENS}` with the number "
            "of response tokens."
        )
    if variant.name == COMPOSE:
        for finding in measure(chain.steps):
            if finding.severity == "error":
                yield f"{finding.text} A run with this list is rejected. {finding.fix}"
    if weights is not None and _ignores_weights(variant):
        yield (
            "algorithm.rewards.weights has no effect on this estimator, and verl_ext rejects a run that sets it. Set "
            "algorithm.rewards.weights=null for this variant."
        )


def _ignores_weights(variant: Variant) -> bool:
    keys = variant.settings.rewards.keys or (SCORE,)
    return not weights_matter(variant.chain, synthetic_batches_for(variant.chain, keys))


def accuracy(settings: Settings, rollouts: Rollouts) -> tuple[str, Array]:
    """Return the name and the values in [0, 1] of the accuracy.

    If a dump stores the accuracy, and no setting names another, that is used. Otherwise it is the reward of
    `accuracy_key`, the reward `acc`, or the score if there is at most one reward.
    """
    rewards, run = settings.rewards, settings_of(rollouts).rewards
    named = (rewards.accuracy_key, rewards.accuracy_threshold)
    if "accuracy" in rollouts.table and named == (run.accuracy_key, run.accuracy_threshold):
        return "accuracy", rollouts.table["accuracy"].to_numpy(float)
    key = rewards.accuracy_in(rollouts.rewards, score=rollouts.total)
    if key == rollouts.total and rewards.accuracy_key is None and len(rewards.keys or ()) > 1:
        raise ConfigurationError(
            "algorithm.rewards.accuracy_key is not set, and no reward is named 'acc', so the accuracy is not known. "
            f"Set algorithm.rewards.accuracy_key to one of {listed(rewards.keys or ())}. If the values of this reward "
            "are not in [0, 1], also set algorithm.rewards.accuracy_threshold."
        )
    values = rollouts.reward(key, "algorithm.rewards.accuracy_key")
    uids = rollouts.table["uid"].tolist()
    return key, unit_accuracy(values, uids, key=key, threshold=rewards.accuracy_threshold)
