"""Find the log that verl's file logger wrote for a run, and read it as a table of steps by metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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


def find_log(run: Path) -> Path:
    """Return the log of a run: the path itself, or the log in a folder."""
    if run.is_file():
        return run
    logs = [run / METRICS] if (run / METRICS).is_file() else sorted(run.glob("*.jsonl"))
    if len(logs) != 1:
        if runs := sorted(str(log.parent) for log in run.glob(f"*/{METRICS}")):
            raise DataError(
                f"{run} contains no log, but its subfolders do. Use `python -m verl_ext report {' '.join(runs)}`."
            )
        if len(logs) > 1:
            raise DataError(
                f"{run} contains no {METRICS}, but several .jsonl files. Use the path of one of {listed(logs)}."
            )
        what = "contains no log" if run.exists() else "does not exist"
        raise DataError(
            f"{run} {what}. Use the path of a log, or of a folder with {METRICS} or one .jsonl file. With "
            "trainer.logger=[console,file], verl writes the log of a run to <project_name>/<experiment_name>.jsonl in "
            "the working directory, or to the file in VERL_FILE_LOGGER_PATH."
        )
    return logs[0]


def read_log(path: Path) -> Log:
    """Read a log. A step below the previous one begins a resumed run, whose values replace those logged before."""
    import pandas as pd

    kept: list[tuple[int, dict[str, float]]] = []
    resumed, torn = [], 0
    for number, record in enumerate(json_lines(path), start=1):
        if record is None or not {"step", "data"} <= record.keys():
            torn += 1
            continue
        with explaining_errors(f"{path}:{number}"):
            step = int(float(record["step"]))
            data = {name: float(value) for name, value in record["data"].items() if isinstance(value, int | float)}
        if kept and step < kept[-1][0]:
            kept = [old for old in kept if old[0] <= step]
            resumed.append(step)
        kept.append((step, data))
    table = pd.DataFrame([data for _, data in kept], index=[step for step, _ in kept], dtype=float)
    infinite = table.abs() == float("inf")
    table = table.mask(infinite).dropna(axis="columns", how="all")
    if table.empty:
        raise DataError(
            f"{path} contains no metrics. Use a log of verl's file logger, which has lines like "
            '{"step": 1, "data": {...}}.'
        )
    notes = []
    if resumed:
        steps = ", ".join(map(str, resumed[-5:]))
        notes.append(f"The run resumed at step {steps}. From there on, the values logged last are used.")
    if torn:
        notes.append(f"Skipped {torn} unreadable line(s).")
    for name, where in infinite.items():
        if where.any():
            notes.append(
                f"The metric {name} is infinite at {where.sum()} step(s), first at step {where.idxmax()}. These values "
                "are skipped."
            )
    return Log(path, table.groupby(level=0).last(), tuple(notes))
