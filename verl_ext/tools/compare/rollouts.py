"""Scored answers: those of a run, or of any table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ext.core.batch import check_finite
from verl_ext.core.groups import Array, Groups, Index
from verl_ext.core.items import Items
from verl_ext.errors import ConfigurationError, DataError, listed, unknown
from verl_ext.settings import RewardsSettings

if TYPE_CHECKING:
    import pandas as pd

SCORE, SUM = "score", "weighted sum"
TOKENS, ANSWERS = "tokens", "answers"


@dataclass(frozen=True)
class About:
    """What the metadata of a dump say: of which update it is, and of which run."""

    step: int
    update: int
    estimator: str
    algorithm: Mapping[str, Any]
    """The run's section `algorithm`, as plain data."""
    loss_agg_mode: str


@dataclass(frozen=True)
class Rollouts:
    """`N` trajectories in the order of the run's updates."""

    path: Path
    table: pd.DataFrame
    """One row a trajectory: `step`, `update`, `uid`, `reward/<key>`; in a dump also `advantage`, by turn `turn`."""
    rewards: Mapping[str, Array]
    """Each reward as it was scored, NaN where it was not; the score is one of them."""
    parts: Mapping[str, Array]
    """What each reward adds to the total, and the total itself."""
    total: str
    """The reward that verl's grpo works on: the score; in a dump of this package the total that the run trained on."""
    counts: Mapping[str, Any]
    """`[N]` each, named as in `Batch.of`: `lengths`, and `outputs` where they are known."""
    unit: str
    """What the lengths count: tokens, or answers if nothing is known of their length."""
    run: About | None = None
    """The last update of the run that wrote the dump."""
    notes: tuple[str, ...] = ()
    """What was left out or assumed."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of the run's rewards in its total, where they are not 1."""
    items: Mapping[str, Items] = field(default_factory=dict)
    """The rewards by item; `rewards` has their weighted sums."""

    @cached_property
    def groups(self) -> Groups:
        """The answers to one prompt in one update; by turn those that reached the turn."""
        return Groups.of(zip(self.prompts.ids.tolist(), self.turns.tolist(), strict=True))

    @cached_property
    def prompts(self) -> Groups:
        """The rows of each prompt in one update."""
        return Groups.of(zip(*(self.table[name].tolist() for name in ("step", "update", "uid")), strict=True))

    @cached_property
    def turns(self) -> Index:
        """The turn of each row, from 0; all are 0 without rewards by turn."""
        numbers = self.table["turn"].fillna(1) if "turn" in self.table else np.ones(len(self.table))
        return np.asarray(numbers, dtype=np.intp) - 1

    def of_prompts(self, values: Array) -> Array:
        """Return for each group the mean over the answers to its prompt, each once."""
        means = self.prompts.mean(np.where(self.turns == 0, values, np.nan))
        return self.prompts.broadcast(means)[self.groups.order[self.groups.starts]]

    @cached_property
    def updates(self) -> Mapping[tuple[int, int], Index]:
        """The rows of each (step, update), in order."""
        return dict(self.table.groupby(["step", "update"]).indices)

    def reward(self, key: str, setting: str) -> Array:
        """Return the values of a reward; raise if the files do not have it."""
        if key not in self.rewards:
            raise DataError(f"{setting}: {unknown('reward', key, self.rewards)}")
        return self.rewards[key]

    def with_items(self, keys: Collection[str]) -> Rollouts:
        """Return the same with the rewards by item, which are text in the files."""
        labels = [self.prompts.labels[place] for place in self.prompts.ids]
        items = {key: Items.of(key, labels, self.table.get(f"reward/{key}", [None] * len(labels))) for key in keys}
        totals = {key: items[key].total for key in keys}
        parts = {key: total * self.weights.get(key, 1.0) for key, total in totals.items()}
        return replace(self, items=items, rewards={**self.rewards, **totals}, parts={**self.parts, **parts})

    def scored(self, settings: RewardsSettings) -> Rollouts:
        """Return the same with a score: the weighted sum of the named rewards, if the files have no score."""
        if self.total in self.rewards:
            return self
        if settings.keys is None:
            raise ConfigurationError(
                f"there is no column {SCORE!r}: name the rewards to add up, 'algorithm.rewards.keys=[...]' with some "
                f"of {listed(self.rewards)}"
            )
        columns = np.stack([self.reward(key, "algorithm.rewards.keys") for key in settings.keys], axis=1)
        check_finite(columns, settings.keys, self.table["uid"].tolist())
        weighed = np.nan_to_num(columns) * np.array(settings.weights or [1.0] * len(settings.keys))
        total = weighed.sum(axis=1)
        total[np.isnan(columns).all(axis=1)] = np.nan
        parts = {**dict(zip(settings.keys, weighed.T, strict=True)), self.total: total}
        return replace(self, rewards={**self.rewards, self.total: total}, parts=parts)

    @property
    def summary(self) -> str:
        """Say how much was read, and from where."""
        steps, sizes, count = self.table["step"], self.groups.sizes, len(self.updates)
        span = f"steps {steps.min()} to {steps.max()}" if steps.any() else "one batch"
        answers = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
        batches = f", {count} batches" if count > 1 else ""
        turns = f"{len(self.table):,} turns of " if self.turns.any() else ""
        whole = np.count_nonzero(self.turns == 0)
        return f"{turns}{whole:,} trajectories in {len(sizes):,} groups of {answers}, {span}{batches}: {self.path}"
