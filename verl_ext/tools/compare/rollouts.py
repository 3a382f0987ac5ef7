"""Hold scored responses, of a run or of any table."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ext.core.batch import check_finite
from verl_ext.core.groups import Array, Groups, Index
from verl_ext.core.rubrics import Criteria
from verl_ext.errors import ConfigurationError, DataError, listed, unknown
from verl_ext.settings import RewardsSettings

if TYPE_CHECKING:
    import pandas as pd

SCORE = "score"
WEIGHTED_SUM = "weighted sum"
TOKENS = "tokens"
RESPONSES = "responses"


@dataclass(frozen=True)
class DumpMetadata:
    """The metadata of a dump: the update that it holds, the settings of its run, and its times."""

    step: int
    update: int
    estimator: str
    algorithm: Mapping[str, Any]
    """The section `algorithm` of the run, as plain data."""
    loss_agg_mode: str
    total_is_weighted_sum: bool
    """Whether the column `total` is the weighted sum of the rewards. If not, an estimator of verl used the score."""
    after_step: int
    """The step after which the start or resume that wrote the dump begins."""
    started_at: float
    """When this start began to dump, in seconds since 1970 by the clock of its machine."""
    written_at: float
    """When the dump was written, by the same clock."""


@dataclass(frozen=True)
class Rollouts:
    """`N` trajectories, or turns with per-turn rewards, in the order of the run's updates."""

    path: Path
    table: pd.DataFrame
    """One row per trajectory, or per turn if the run has per-turn rewards.

    The columns are `step`, `update`, `uid` and `reward/<key>`; in a dump also `advantage`, and with turns `turn`."""
    rewards: Mapping[str, Array]
    """`[N]` each reward as it was scored, NaN where it was not scored. `with_score` adds the score."""
    contributions: Mapping[str, Array]
    """`[N]` what each reward adds to the total, and the total itself."""
    total_key: str
    """Name of the reward on which the baseline grpo is computed: the score, or in a dump the total of the run."""
    counts: Mapping[str, Any]
    """`[N]` each, named as in `Batch.of`: `lengths`, and `outputs` if they are known."""
    length_unit: str
    """What the lengths count: tokens, or responses (1 each) if the number of tokens is not known."""
    run: DumpMetadata | None = None
    """The last update of the run that wrote the dump."""
    notes: tuple[str, ...] = ()
    """Sentences about rows that were skipped, and about assumptions."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weights of the run's rewards in its total, if they are not 1."""
    rubrics: Mapping[str, Criteria] = field(default_factory=dict)
    """The rubrics; `rewards` has their weighted sums."""

    @cached_property
    def prompts(self) -> Groups:
        """The rows of each prompt in one update."""
        columns = [self.table[name].tolist() for name in ("step", "update", "uid")]
        return Groups.of(zip(*columns, strict=True))

    @cached_property
    def turns(self) -> Index:
        """`[N]` the turn of each row, from 0; all are 0 without per-turn rewards."""
        if "turn" not in self.table:
            return np.zeros(len(self.table), dtype=np.intp)
        numbers_from_1: Index = self.table["turn"].fillna(1).to_numpy(np.intp)
        return numbers_from_1 - 1

    @cached_property
    def groups(self) -> Groups:
        """The responses to one prompt in one update; with per-turn rewards, those that reached the same turn."""
        prompt_and_turn = zip(self.prompts.ids.tolist(), self.turns.tolist(), strict=True)
        return Groups.of(prompt_and_turn)

    def prompt_means(self, values: Array) -> Array:
        """Return `[G]` the mean over the responses to the prompt of each group; each response counts once."""
        values_of_responses = np.where(self.turns == 0, values, np.nan)
        mean_of_prompt = self.prompts.mean(values_of_responses)
        mean_of_row = self.prompts.broadcast(mean_of_prompt)
        first_row_of_group = self.groups.order[self.groups.starts]
        return mean_of_row[first_row_of_group]

    @cached_property
    def updates(self) -> Mapping[tuple[int, int], Index]:
        """The rows of each (step, update), in order."""
        return dict(self.table.groupby(["step", "update"]).indices)

    def reward(self, key: str, setting: str) -> Array:
        """Return the values of a reward; raise an error that names the setting if the rollouts lack it."""
        if key in self.rewards:
            return self.rewards[key]
        if f"reward/{key}" in self.table:
            raise DataError(
                f"{setting} names {key!r}, but this column of {self.path} contains no numbers. The columns with "
                f"numbers are {listed(self.rewards)}. If {key!r} contains rubrics, add the argument "
                f"'algorithm.rewards.rubrics=[{key}]'."
            )
        raise DataError(f"{setting}: {unknown('reward', key, self.rewards)}.")

    def with_rubrics(self, keys: Collection[str]) -> Rollouts:
        """Return these rollouts with the values of rubrics, which are text in the files."""
        prompt_of_row = [self.prompts.labels[prompt] for prompt in self.prompts.ids]
        no_texts = [None] * len(self.table)
        rubrics = {}
        rewards = dict(self.rewards)
        contributions = dict(self.contributions)
        for key in keys:
            texts = self.table.get(f"reward/{key}", no_texts)
            rubric = Criteria.of(key, prompt_of_row, texts)
            rubrics[key] = rubric
            rewards[key] = rubric.total
            contributions[key] = rubric.total * self.weights.get(key, 1.0)
        return replace(self, rubrics=rubrics, rewards=rewards, contributions=contributions)

    def with_score(self, settings: RewardsSettings) -> Rollouts:
        """Return these rollouts with a score. If the files have none, it is the weighted sum of the named rewards."""
        if self.total_key in self.rewards:
            return self
        keys = settings.keys
        if keys is None:
            raise ConfigurationError(
                f"{self.path} has no column {SCORE!r}, and algorithm.rewards.keys is not set for all variants. Add the "
                f"argument 'algorithm.rewards.keys=[...]' with some of the rewards {listed(self.rewards)}."
            )
        values = np.stack([self.reward(key, "algorithm.rewards.keys") for key in keys], axis=1)  # [N, K]
        check_finite(values, keys, self.table["uid"].tolist())
        weights = np.array(settings.weights or [1.0] * len(keys))
        weighted = np.nan_to_num(values) * weights
        is_unscored = np.isnan(values).all(axis=1)
        total = np.where(is_unscored, np.nan, weighted.sum(axis=1))
        contributions = dict(zip(keys, weighted.T, strict=True))
        contributions[self.total_key] = total
        return replace(self, rewards={**self.rewards, self.total_key: total}, contributions=contributions)

    @property
    def summary(self) -> str:
        """A sentence about how much was read, and from where."""
        trajectories = np.count_nonzero(self.turns == 0)
        rows = f"{trajectories:,} trajectories"
        if self.turns.any():
            rows = f"{len(self.table):,} turns of {rows}"
        smallest, largest = self.groups.sizes.min(), self.groups.sizes.max()
        group_size = f"{smallest}" if smallest == largest else f"{smallest} to {largest}"
        steps = self.table["step"]
        span = f"steps {steps.min()} to {steps.max()}" if steps.any() else "one batch"
        if len(self.updates) > 1:
            span += f", {len(self.updates)} batches"
        return f"Read {rows} in {len(self.groups):,} groups of {group_size}, {span}, from {self.path}"

    @property
    def row_name(self) -> str:
        """What a row of the table is, in the plural."""
        return "turns" if self.turns.any() else "trajectories"


def lengths_of(frame: pd.DataFrame) -> tuple[Array, str]:
    """Return the length of each row, and what it counts."""
    if TOKENS in frame and frame[TOKENS].notna().all():
        return frame[TOKENS].to_numpy(float), TOKENS
    return np.ones(len(frame)), RESPONSES


def require_values(path: Path, what: str, is_missing: pd.Series[bool]) -> None:
    """Raise if a row lacks a value. `what` names the value."""
    if is_missing.any():
        raise DataError(
            f"{is_missing.sum():,} of {len(is_missing):,} rows of {path} have no {what}. Add the missing values, or "
            "remove these rows."
        )
