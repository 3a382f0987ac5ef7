"""What is compared: estimators with their settings, and the advantages that they give."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl_ext.core.batch import Batch, unit_accuracy
from verl_ext.core.chain import Chain
from verl_ext.core.groups import Array
from verl_ext.core.items import spread
from verl_ext.core.turns import Turns
from verl_ext.errors import ConfigurationError, listed
from verl_ext.registry import INSTALLED, build
from verl_ext.settings import RewardsSettings, Settings
from verl_ext.tools.arguments import parse_settings
from verl_ext.tools.compare.rollouts import TOKENS, Rollouts

GRPO = "grpo"
UNUSED = tuple(f"algorithm.rewards.{name}=" for name in ("accuracy_between", "log", "rejected", "token_scores"))
"""Settings without effect on rollouts that are stored."""
_SETTING = re.compile(r"\s+(?=[+~]*[\w.@/]+=)")
"""Where a setting begins. Spaces inside `[...]` and `{...}` are followed by no `KEY=`."""
_ROUNDING = 1e-4
"""Advantages are computed in float64 here, and recorded in float64 or float32."""


@dataclass(frozen=True)
class Variant:
    """An estimator with its settings."""

    name: str
    """The estimator."""
    text: str
    """As the user wrote it; the tables call it so."""
    settings: Settings
    chain: Chain


@dataclass(frozen=True)
class Outcome:
    """The advantages of a variant."""

    variant: Variant
    advantages: Array
    parts: Mapping[str, Array]
    """What each reward adds to the sum."""
    total: Array
    """The sum; NaN if it has no parts."""
    notes: tuple[str, ...] = ()


def parse(arguments: Sequence[str], rollouts: Rollouts) -> tuple[list[Variant], Settings]:
    """Return the variants, grpo on the score first, and the settings that all of them share.

    A setting that no argument names is that of the run, where its dump has the settings.
    """
    shared: list[str] = []
    named: list[tuple[str, list[str], str]] = []
    for argument in arguments:
        first, *overrides = _SETTING.split(argument.strip())
        if "=" in first.partition("[")[0]:
            shared += [first, *overrides]
        elif first.startswith("["):
            named.append(("compose", [f"algorithm.compose.steps={first}", *overrides], argument))
        else:
            named.append((first, overrides, argument))
    if not named:
        raise ConfigurationError(f"name an estimator to compare with grpo: {listed(INSTALLED)}, or a list in [...]")
    for text in (*shared, *(text for _, overrides, _ in named for text in overrides)):
        if text.startswith(UNUSED):
            raise ConfigurationError(f"compare computes the same advantages whatever {text} is: leave it out")
    common = settings_of(rollouts, shared)
    plain = Settings(norm_by_std=common.norm_by_std)
    variants = [Variant(GRPO, GRPO, plain, build(GRPO, plain))]
    for name, overrides, text in named:
        settings = settings_of(rollouts, [*shared, *overrides])
        chain = build(name, settings)
        if chain.per_reward and settings.rewards.keys is None:
            raise ConfigurationError(
                f"{name} works on each reward separately: add 'algorithm.rewards.keys=[...]' with some of "
                f"{listed(rollouts.rewards)}"
            )
        called = "grpo (sum)" if text == GRPO and settings.rewards.keys else text
        variants.append(Variant(name, called, settings, chain))
    texts = [variant.text for variant in variants]
    if twice := {text for text in texts if texts.count(text) > 1}:
        raise ConfigurationError(f"{listed(twice)} is there twice (grpo on the score always is): leave one out")
    return variants, common


def settings_of(rollouts: Rollouts, overrides: Sequence[str] = ()) -> Settings:
    """Return the settings of the run with some overrides; rollouts hold no KL term.

    A list of steps may name code to import, so only the command line gives one.
    """
    run = rollouts.run
    if run is None:
        return parse_settings(overrides)
    algorithm = {name: value for name, value in run.algorithm.items() if name != "compose"}
    return replace(parse_settings(overrides, algorithm, run.loss_agg_mode), kl_in_reward=False)


def outcome(variant: Variant, rollouts: Rollouts) -> Outcome:
    """Compute the advantages update by update: an estimator may carry state from one to the next."""
    chain, rewards_settings = variant.chain, variant.settings.rewards
    keys = rewards_settings.keys or (rollouts.total,)
    rewards = [rollouts.items.get(key, rollouts.reward(key, "algorithm.rewards.keys")) for key in keys]
    per_turn = _by_turn(rewards_settings, keys, rollouts)
    accuracies = accuracy(variant.settings, rollouts)[1] if chain.needs_accuracy else None
    uids = rollouts.table["uid"].to_numpy()
    state: Mapping[str, Any] = chain.init()
    advantages, total, parts = np.zeros(len(uids)), np.full(len(uids), np.nan), np.zeros((len(uids), len(keys)))
    for rows in rollouts.updates.values():
        batch = Batch.of(
            labels=uids[rows].tolist(),
            **spread(keys, [column[rows] for column in rewards]),
            conditions=rewards_settings.conditions,
            turns=Turns(rollouts.turns[rows], per_turn, rewards_settings.turn_discount),
            accuracy=None if accuracies is None else accuracies[rows],
            **{name: values[rows] for name, values in rollouts.counts.items()},
        )
        result = chain(batch, state)
        state, advantages[rows] = result.state, result.advantages
        if result.summed is not None:
            parts[rows], total[rows] = result.summed
    said = [*_odd(chain, rollouts, rewards_settings.weights)]
    if rollouts.run is not None and rollouts.run.estimator == variant.name:
        apart = float(np.abs(advantages - rollouts.table["advantage"].to_numpy(float)).max())
        same = "equal" if apart < _ROUNDING else f"differ by up to {apart:.3g} from"
        said.append(f"its advantages {same} those that the run recorded")
    named = tuple(f"{variant.text}: {text}" for text in said)
    by_key = rollouts.parts if rewards_settings.keys is None else dict(zip(keys, parts.T, strict=True))
    return Outcome(variant, advantages, by_key, total, named)


def _by_turn(settings: RewardsSettings, keys: Sequence[str], rollouts: Rollouts) -> tuple[int, ...]:
    """Return the places of the rewards that a dump has by turn; raise if a variant names others."""
    recorded = [] if rollouts.run is None else settings_of(rollouts).rewards.per_turn or ()
    if set(settings.per_turn or ()) != set(recorded).intersection(keys):
        raise ConfigurationError(
            f"algorithm.rewards.per_turn={list(settings.per_turn or ())}: of {listed(keys)} the rollouts have "
            f"{listed(recorded)} by turn; name those"
        )
    return tuple(place for place, key in enumerate(keys) if key in recorded)


def _odd(chain: Chain, rollouts: Rollouts, weights: tuple[float, ...] | None) -> Iterator[str]:
    """Say which numbers may not be those of a run."""
    if chain.stateful and len(rollouts.updates) > 1:
        yield "its history begins with these rollouts"
    elif chain.stateful:
        yield "it has no history in a single batch: a column `step` says to which step of the training a row belongs"
    by_tokens = any(getattr(step, "over", None) == "token" for step in chain.steps)
    if by_tokens and rollouts.unit != TOKENS:
        yield f"approximate: it weighs by tokens, here by {rollouts.unit}, because no column `{TOKENS}` has them"
    if weights is not None and not any(hasattr(step, "weights") for step in chain.steps):
        yield "algorithm.rewards.weights have no effect on it, and a run with them is refused"


def accuracy(settings: Settings, rollouts: Rollouts) -> tuple[str, Array]:
    """Return the name and the values in [0, 1] of the accuracy.

    A dump's accuracy is taken unless a setting names another; else `acc`; else the score, if it is the only reward.
    """
    rewards, run = settings.rewards, settings_of(rollouts).rewards
    named = (rewards.accuracy_key, rewards.accuracy_threshold)
    if "accuracy" in rollouts.table and named == (run.accuracy_key, run.accuracy_threshold):
        return "accuracy", rollouts.table["accuracy"].to_numpy(float)
    key = rewards.accuracy_in(rollouts.rewards, score=rollouts.total)
    if key == rollouts.total and rewards.accuracy_key is None and len(rewards.keys or ()) > 1:
        raise ConfigurationError(
            f"which reward is the accuracy? Set algorithm.rewards.accuracy_key to one of {listed(rewards.keys or ())}"
        )
    values = rollouts.reward(key, "algorithm.rewards.accuracy_key")
    uids = rollouts.table["uid"].tolist()
    return key, unit_accuracy(values, uids, key=key, threshold=rewards.accuracy_threshold)
