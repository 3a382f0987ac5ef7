"""The rollouts of a run, as one table: verl's JSON lines, or the parquet files of `algorithm.verl_ext.dump_dir`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from verl_ext.core.groups import Array, Groups, Index
from verl_ext.errors import DataError, printable, unknown

TOKENS, CHARACTERS = "tokens", "characters"
SCORE_ALONE = (
    "verl's default trainer writes the score alone to trainer.rollout_data_dir; named rewards are in "
    "trainer.validation_data_dir, in algorithm.verl_ext.dump_dir, and in the rollouts of the legacy trainer "
    "(trainer.use_v1=False)"
)


@dataclass(frozen=True)
class Source:
    """Where the text of each trajectory is: its file and its line."""

    files: tuple[Path, ...]
    file: Index
    line: Index


@dataclass(frozen=True)
class Rollouts:
    """`N` trajectories, sorted by the batch that they belong to: one update of a run."""

    path: Path
    step: Index
    """`[N]`."""
    update: Index
    """`[N]` verl's asynchronous trainers make several updates a step."""
    groups: Groups
    prompts: Sequence[str]
    """`[G]` the uid of each group, or a hash of its text."""
    columns: Mapping[str, Array]
    """The rewards that were read, by name, NaN where not scored."""
    names: Collection[str]
    """Every reward that the files have."""
    total: str
    """The column that verl's grpo works on."""
    lengths: Array | None
    unit: str
    """What `lengths` counts: tokens or characters."""
    notes: tuple[str, ...] = ()
    source: Source | None = None
    wrong: Mapping[str, str] = field(default_factory=dict)
    """Columns with a value that is not a number: what was found, and where."""

    def column(self, key: str, setting: str) -> Array:
        """The values of a reward; raise if the files do not have it."""
        if key in self.wrong:
            raise DataError(f"reward {key!r} ({setting}) is not a number: {self.wrong[key]}")
        if key not in self.names:
            alone = f". {SCORE_ALONE}" if self.score_alone else ""
            raise DataError(f"{setting}: {unknown('reward', key, self.names)}{alone}")
        return self.columns[key]

    @property
    def score_alone(self) -> bool:
        """Whether these are lines of verl without a named reward."""
        return self.source is not None and set(self.names) <= {self.total}

    @cached_property
    def batches(self) -> list[slice]:
        """The rows of each update, in order."""
        changes = np.flatnonzero((np.diff(self.step) != 0) | (np.diff(self.update) != 0)) + 1
        edges = [0, *changes.tolist(), len(self.step)]
        return [slice(start, stop) for start, stop in itertools.pairwise(edges)]

    def summary(self) -> Iterator[str]:
        """What was read, and what was left out or assumed."""
        first, last, sizes = self.step[0], self.step[-1], self.groups.sizes
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        batches = f", {len(self.batches)} batches" if len(self.batches) > 1 else ""
        answers = f"{sizes.min()}" if sizes.min() == sizes.max() else f"{sizes.min()} to {sizes.max()}"
        yield (
            f"{len(self.step):,} trajectories in {len(self.groups):,} groups of {answers}, {steps}{batches}: "
            f"{printable(self.path)}"
        )
        yield from self.notes
        if alone := int((sizes == 1).sum()):
            yield (
                f"{alone:,} of {len(sizes):,} groups have one trajectory: it has nothing to be compared with, and its "
                "advantage is 0 (verl's own grpo gives it its raw score)"
            )
