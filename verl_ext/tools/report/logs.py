"""Find and read what verl's loggers wrote of a run, as a table with a row a step and a column a metric."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.errors import ConfigurationError, DataError, listed
from verl_ext.tools.rollouts import METRICS

if TYPE_CHECKING:
    import pandas as pd

EVENTS = "events.out.tfevents.*"
Record = tuple[int, Mapping[str, Any]]


@dataclass(frozen=True)
class Log:
    """What a run logged."""

    path: Path
    table: pd.DataFrame
    """Steps, ascending, by metrics; NaN where a metric was not logged."""
    notes: tuple[str, ...]

    def has(self, metric: str) -> bool:
        """Return whether a metric has a value at some step."""
        return metric in self.table and bool(self.table[metric].notna().any())


def find_log(run: Path) -> Path:
    """Find the log of a run: the path itself, or the log in a run's folder."""
    if not run.exists():
        raise DataError(f"{run} does not exist")
    if run.is_file():
        return run
    logs = [run / METRICS] if (run / METRICS).is_file() else sorted(run.glob("*.jsonl"))
    if len(logs) == 1:
        return logs[0]
    for folder in (run, run / "tensorboard"):
        if not logs and any(folder.glob(EVENTS)):
            return folder
    raise DataError(
        f"{run} holds {listed(path.name for path in logs)}, expected {METRICS}, one .jsonl file, or tensorboard's "
        "files; 'trainer.logger=[console,file]' writes a log to <project_name>/<experiment_name>.jsonl, or to "
        "VERL_FILE_LOGGER_PATH"
    )


def read_log(parts: Sequence[Path]) -> Log:
    """Read the parts of one run in order. A step that is below the last one begins a resumed part, which counts."""
    import pandas as pd

    kept: list[Record] = []
    resumed, torn = [], 0
    for record in (each for part in parts for each in (_events(part) if part.is_dir() else _lines(part))):
        if record is None:
            torn += 1
            continue
        if kept and record[0] < kept[-1][0]:
            kept = [old for old in kept if old[0] <= record[0]]
            resumed.append(record[0])
        kept.append(record)
    table = pd.DataFrame([_numbers(data) for _, data in kept], index=[step for step, _ in kept], dtype=float)
    table = table.replace([float("inf"), -float("inf")], float("nan")).dropna(axis="columns", how="all")
    if table.empty:
        raise DataError(f"{listed(parts)} holds no metrics of verl's file logger ({{'step': ..., 'data': {{...}}}})")
    notes = [f"resumed at step {', '.join(map(str, resumed[-5:]))}: the later values count"] if resumed else []
    notes += [f"{torn} unreadable line(s) left out"] if torn else []
    return Log(parts[-1], table.groupby(level=0).last(), tuple(notes))


def _lines(path: Path) -> Iterator[Record | None]:
    """Yield the records of verl's file logger; None for a line that a killed process left torn."""
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
            yield int(record["step"]), dict(record["data"])
        except (ValueError, KeyError, TypeError):
            yield None


def _numbers(data: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in data.items() if isinstance(value, int | float)}


def _events(folder: Path) -> Iterable[Record]:
    """Yield the scalars of a tensorboard folder in the order in which they were written."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
    except ImportError as error:
        raise ConfigurationError(f"{folder} is a tensorboard folder: pip install tensorboard to read it") from error
    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0}, purge_orphaned_data=False)
    events.Reload()
    written = ((event, tag) for tag in events.Tags()[SCALARS] for event in events.Scalars(tag))
    for event, tag in sorted(written, key=lambda item: item[0].wall_time):
        yield event.step, {tag: event.value}
