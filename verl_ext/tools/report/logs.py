"""Find the log that verl's file logger wrote for a run, and read it as a table of steps by metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from verl_ext.errors import DataError, explaining_errors, listed
from verl_ext.files import METRICS, json_lines

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Log:
    """The metrics of a run."""

    path: Path
    table: pd.DataFrame
    """One row per step, ascending, and one column per metric; NaN if a metric was not logged at a step."""
    notes: tuple[str, ...]


class _Record(NamedTuple):
    """One line of a log."""

    step: int
    metrics: dict[str, float]


def find_log(run: Path) -> Path:
    """Return the log of a run: the path itself, or the log in a folder."""
    if run.is_file():
        return run
    if (run / METRICS).is_file():
        return run / METRICS
    logs = sorted(run.glob("*.jsonl"))
    if len(logs) == 1:
        return logs[0]
    subfolders = sorted(str(log.parent) for log in run.glob(f"*/{METRICS}"))
    if subfolders:
        raise DataError(
            f"{run} contains no log, but its subfolders do. Use `python -m verl_ext report {' '.join(subfolders)}`."
        )
    if logs:
        raise DataError(
            f"{run} contains no {METRICS}, but several .jsonl files. Use the path of one of {listed(logs)}."
        )
    problem = "contains no log" if run.exists() else "does not exist"
    raise DataError(
        f"{run} {problem}. Use the path of a log, or of a folder with {METRICS} or one .jsonl file. With "
        "trainer.logger=[console,file], verl writes the log of a run to <project_name>/<experiment_name>.jsonl in "
        "the working directory, or to the file in VERL_FILE_LOGGER_PATH."
    )


def read_log(path: Path) -> Log:
    """Read a log. A step below the previous one begins a resumed run, whose values replace those logged before."""
    import pandas as pd

    records, unreadable_lines = _records(path)
    kept_records, resumed_steps = _join_resumes(records)
    metrics = [record.metrics for record in kept_records]
    steps = [record.step for record in kept_records]
    logged = pd.DataFrame(metrics, index=steps, dtype=float)
    is_infinite = logged.abs() == float("inf")
    finite = logged.mask(is_infinite).dropna(axis="columns", how="all")
    if finite.empty:
        raise DataError(
            f"{path} contains no metrics. Use a log of verl's file logger, which has lines like "
            '{"step": 1, "data": {...}}.'
        )
    # A step can be logged in several lines. For each metric, its last value counts.
    table = finite.groupby(level=0).last()
    notes = _notes(resumed_steps, unreadable_lines, is_infinite)
    return Log(path, table, tuple(notes))


def _records(path: Path) -> tuple[list[_Record], int]:
    """Return the readable lines of a log, and the number of the others."""
    records = []
    unreadable_lines = 0
    for number, line in enumerate(json_lines(path), start=1):
        if line is None or not {"step", "data"} <= line.keys():
            unreadable_lines += 1
            continue
        with explaining_errors(f"{path}:{number}"):
            step = int(float(line["step"]))
            numbers = {name: float(value) for name, value in line["data"].items() if isinstance(value, int | float)}
        records.append(_Record(step, numbers))
    return records, unreadable_lines


def _join_resumes(records: Sequence[_Record]) -> tuple[list[_Record], list[int]]:
    """Return the records without later steps that a resumed run repeats, and the steps at which the run resumed."""
    kept: list[_Record] = []
    resumed_steps = []
    for record in records:
        if kept and record.step < kept[-1].step:
            kept = [earlier for earlier in kept if earlier.step <= record.step]
            resumed_steps.append(record.step)
        kept.append(record)
    return kept, resumed_steps


def _notes(resumed_steps: Sequence[int], unreadable_lines: int, is_infinite: pd.DataFrame) -> list[str]:
    """Return sentences about the values of a log that are not used."""
    notes = []
    if resumed_steps:
        last_steps = ", ".join(map(str, resumed_steps[-5:]))
        notes.append(f"The run resumed at step {last_steps}. From there on, the values logged last are used.")
    if unreadable_lines:
        notes.append(f"Skipped {unreadable_lines} unreadable line(s).")
    for name, at_step in is_infinite.items():
        if at_step.any():
            notes.append(
                f"The metric {name} is infinite at {at_step.sum()} step(s), first at step {at_step.idxmax()}. These "
                "values are skipped."
            )
    return notes
