"""Read dumps of verl_ext, and join the starts of a run: a later start replaces the steps after its first step."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext.core.schema import parse_dataclass
from verl_ext.errors import DataError, explaining_errors
from verl_ext.settings import Settings
from verl_ext.tools.compare.rollouts import SCORE, DumpMetadata, Rollouts, lengths_of, require_values

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class _Dump:
    """One file of a dump: the trajectories of one update."""

    folder: Path
    metadata: DumpMetadata
    table: pd.DataFrame


_Updates = dict[tuple[int, int], _Dump]
"""Dumps by step and update."""


@dataclass(frozen=True)
class _Start:
    """The dumps that one start or resume of a run wrote."""

    folder: Path
    after_step: int
    started_at: float
    updates: _Updates

    @property
    def last_written_at(self) -> float:
        return max(dump.metadata.written_at for dump in self.updates.values())


def read_dumps(path: Path, files: Sequence[Path]) -> Rollouts:
    """Read the dumps of the latest start, and for earlier steps those of the start from which it resumed."""
    dumps, notes = _load_dumps(files)
    if not dumps:
        raise DataError("\n".join([f"No dump in {path} can be read.", *notes]))
    starts = _starts_in_order(dumps)
    _check_one_run_at_a_time(starts)
    updates = _updates_of_run(starts)
    notes += _notes_on_skipped_steps(starts, updates)
    notes += _notes_on_settings(updates)
    return _rollouts_of(path, updates, notes)


def _load_dumps(files: Sequence[Path]) -> tuple[list[_Dump], list[str]]:
    """Return the readable dumps, and a note about each other file."""
    import pyarrow
    import pyarrow.parquet

    dumps = []
    notes = []
    for file in files:
        try:
            table = pyarrow.parquet.read_table(file)
        except (OSError, pyarrow.ArrowException) as error:
            notes.append(f"{file} is skipped, because it cannot be read: {str(error).splitlines()[0]}")
            continue
        metadata_of_file = table.schema.metadata or {}
        if b"verl_ext" not in metadata_of_file:
            notes.append(f"{file} is skipped, because it has no metadata `verl_ext`, which every dump of verl_ext has.")
            continue
        metadata = _parse_metadata(file, metadata_of_file[b"verl_ext"])
        dumps.append(_Dump(file.parent, metadata, table.to_pandas()))
    return dumps, notes


def _parse_metadata(file: Path, text: bytes) -> DumpMetadata:
    """Parse the metadata of a dump. Raise for those of an earlier version, which have no times."""
    with explaining_errors(file):
        entries = json.loads(text)
        if "started_at" not in entries:
            raise DataError(
                f"{file} has no 'started_at' in its metadata, by which compare orders the starts of a run, so an "
                "earlier version of verl_ext wrote it. Remove the file, or dump the run again with this version."
            )
        return parse_dataclass(DumpMetadata, entries, f"{file}: verl_ext")


def _starts_in_order(dumps: Sequence[_Dump]) -> list[_Start]:
    """Return the starts, the earliest first. All dumps of a start have the same folder and the same start time."""
    starts: dict[tuple[Path, float], _Start] = {}
    for dump in dumps:
        metadata = dump.metadata
        key = (dump.folder, metadata.started_at)
        if key not in starts:
            starts[key] = _Start(dump.folder, metadata.after_step, metadata.started_at, updates={})
        starts[key].updates[metadata.step, metadata.update] = dump
    return sorted(starts.values(), key=lambda start: start.started_at)


def _check_one_run_at_a_time(starts: Sequence[_Start]) -> None:
    """Raise if a start wrote a dump after the next start had begun."""
    for start, next_start in pairwise(starts):
        if start.last_written_at > next_start.started_at:
            raise DataError(
                f"By the times in their metadata, {start.folder} and {next_start.folder} were written by two runs at "
                "the same time. Use one of the two folders, and set another algorithm.verl_ext.dump_dir for each run."
            )


def _updates_of_run(starts: Sequence[_Start]) -> _Updates:
    """Return the updates of the run in order. Each start replaces all steps after the one from which it resumes.

    For example, the first start wrote the steps 1 to 4, and the second resumed from step 2 and wrote step 3. Then the
    history is 1 and 2 of the first start, and 3 of the second. If a third start resumes from step 4, it resumes the
    first start, because the second did not reach step 4. Then the history is 1 to 4 of the first start, and 5 onwards
    of the third.
    """
    histories: list[_Updates] = [{}]
    for start in starts:
        resumed = _resumed_history(histories, start.after_step)
        history = {(step, update): dump for (step, update), dump in resumed.items() if step <= start.after_step}
        history.update(start.updates)
        histories.append(history)
    return dict(sorted(histories[-1].items()))


def _resumed_history(histories: Sequence[_Updates], after_step: int) -> _Updates:
    """Return the latest history that reached a step, because a start that ended earlier has no checkpoint of this step.

    If no history reached the step, for example because a full disk ended the dumps, return the latest history.
    """
    for history in reversed(histories):
        last_step = max((step for step, _ in history), default=0)
        if last_step >= after_step:
            return history
    return histories[-1]


def _notes_on_skipped_steps(starts: Sequence[_Start], updates: _Updates) -> list[str]:
    """Return a note for each start with dumps that are not among the updates of the run."""
    notes = []
    for start in starts:
        skipped = [step for (step, update), dump in start.updates.items() if updates.get((step, update)) is not dump]
        if not skipped:
            continue
        first, last = min(skipped), max(skipped)
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        notes.append(f"Skipped {steps} of {start.folder}. The latest start of the run did not resume from there.")
    return notes


def _notes_on_settings(updates: _Updates) -> list[str]:
    """Return a note if the settings of the run changed."""
    settings = []
    for dump in updates.values():
        metadata = dump.metadata
        settings.append((metadata.estimator, metadata.algorithm, metadata.loss_agg_mode))
    others = len(settings) - settings.count(settings[-1])
    if not others:
        return []
    return [
        f"{others} of {len(updates)} updates had other settings than the last update, whose settings are used here."
    ]


def _rollouts_of(path: Path, updates: _Updates, notes: Sequence[str]) -> Rollouts:
    """Return the trajectories of a run with the settings of its last update."""
    import pandas as pd

    dumps = list(updates.values())
    run = dumps[-1].metadata
    table = pd.concat([dump.table for dump in dumps], ignore_index=True)
    is_missing = table.reindex(columns=["step", "update", "uid"]).isna()
    for column in is_missing:
        require_values(path, repr(column), is_missing[column])
    weights = _weights_of_run(run)
    rewards = {}
    contributions = {}
    for key in _numeric_rewards(table):
        received = table[f"reward/{key}"].astype(float)
        # Without conditions and per-turn rewards, the estimator read the rewards as they were scored, and a dump has no
        # column `raw/<key>`.
        scored = table.get(f"raw/{key}", received).fillna(received)
        rewards[key] = scored.to_numpy(float)
        contributions[key] = received.to_numpy(float) * weights.get(key, 1.0)
    total_key = _key_of_total(rewards)
    rewards[total_key] = table["total"].to_numpy(float)
    contributions[total_key] = rewards[total_key]
    lengths, length_unit = lengths_of(table)
    counts = {"lengths": lengths}
    if "outputs" in table:
        counts["outputs"] = table["outputs"].to_numpy(float)
    return Rollouts(
        path=path,
        table=table,
        rewards=rewards,
        contributions=contributions,
        weights=weights,
        total_key=total_key,
        counts=counts,
        length_unit=length_unit,
        run=run,
        notes=tuple(notes),
    )


def _numeric_rewards(table: pd.DataFrame) -> list[str]:
    """Return the keys of the rewards that are numbers. A rubric is text."""
    columns = table.filter(regex="^reward/").select_dtypes(["number", "bool"])
    return [column.removeprefix("reward/") for column in columns]


def _weights_of_run(run: DumpMetadata) -> dict[str, float]:
    """Return the weights in the total of a run. Estimators of verl do not use `algorithm.rewards.weights`."""
    rewards = Settings.parse(run.algorithm).rewards
    if not run.total_is_weighted_sum or rewards.weights is None:
        return {}
    return dict(zip(rewards.keys or (), rewards.weights, strict=True))


def _key_of_total(keys: Collection[str]) -> str:
    """Return a key for the total that no reward has."""
    names = ["total", SCORE, "sum"]
    names += [f"total {number}" for number in range(2, len(keys) + 2)]
    return next(name for name in names if name not in keys)
