"""Find and read what verl's file logger wrote of a run, as a table with a row a step and a column a metric."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext.errors import DataError, listed, reading
from verl_ext.files import METRICS, json_lines

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Log:
    """What a run logged."""

    path: Path
    table: pd.DataFrame
    """Steps, ascending, by metrics with a value at some step; NaN where a metric was not logged."""
    notes: tuple[str, ...]


def find_log(run: Path) -> Path:
    """Find the log of a run: the path itself, or the log in a run's folder."""
    if run.is_file():
        return run
    logs = [run / METRICS] if (run / METRICS).is_file() else sorted(run.glob("*.jsonl"))
    if len(logs) != 1:
        if runs := sorted(str(log.parent) for log in run.glob(f"*/{METRICS}")):
            raise DataError(f"{run} holds no log but runs: report {' '.join(runs)}")
        what = f"holds {listed(path.name for path in logs)}" if run.exists() else "does not exist"
        raise DataError(
            f"{run} {what}; expected {METRICS} or one .jsonl file; verl writes it with 'trainer.logger=[console,file]' "
            "to <project_name>/<experiment_name>.jsonl, or to VERL_FILE_LOGGER_PATH"
        )
    return logs[0]


def read_log(path: Path) -> Log:
    """Read a log. A step that is below the last one begins a resumed part, which counts."""
    import pandas as pd

    kept: list[tuple[int, dict[str, float]]] = []
    resumed, torn = [], 0
    for number, record in enumerate(json_lines(path), start=1):
        if record is None or not {"step", "data"} <= record.keys():
            torn += 1
            continue
        with reading(f"{path}:{number}"):
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
        raise DataError(f"{path} holds no metrics of verl's file logger ({{'step': ..., 'data': {{...}}}})")
    notes = [f"resumed at step {', '.join(map(str, resumed[-5:]))}: the later values count"] if resumed else []
    notes += [f"{torn} unreadable line(s) left out"] if torn else []
    notes += [
        f"{name} is infinite at {steps.sum()} steps, the first {steps.idxmax()}: they are left out"
        for name, steps in infinite.items()
        if steps.any()
    ]
    return Log(path, table.groupby(level=0).last(), tuple(notes))
