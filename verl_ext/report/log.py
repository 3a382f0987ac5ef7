"""Read what verl's loggers wrote of a run: the `file` logger's jsonl, or a tensorboard folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_ext.errors import ConfigurationError, DataError, listed

METRICS = "metrics.jsonl"
"""The log's name in a run's folder, unless the folder holds one `.jsonl` file of another name."""
EVENTS = "events.out.tfevents.*"

Step = dict[str, float]


@dataclass(frozen=True)
class Log:
    """The metrics of a run by step, in order."""

    path: Path
    steps: Mapping[int, Step]
    unreadable: int = 0
    """Lines that are no records, and are left out."""
    resumed_after: tuple[int, ...] = ()
    """Steps from which the run went on anew; what was logged beyond them before is left out."""

    @property
    def metrics(self) -> set[str]:
        """Names of all metrics of any step."""
        return set().union(*self.steps.values())


@dataclass
class _Reading:
    """Steps in the order in which they were logged.

    A step below the last one means that the run was resumed from a checkpoint: what was logged beyond that step
    belongs to a past that the run has left, and later values of the step itself count.
    """

    steps: dict[int, Step] = field(default_factory=dict)
    last: int | None = None
    resumed_after: list[int] = field(default_factory=list)

    def add(self, step: int, data: Mapping[str, Any]) -> None:
        if self.last is not None and step < self.last:
            self.steps = {known: values for known, values in self.steps.items() if known <= step}
            self.resumed_after.append(max((known for known in self.steps if known < step), default=0))
        self.last = step
        self.steps.setdefault(step, {}).update({name: float(v) for name, v in data.items() if _is_number(v)})


def find_log(run: Path) -> Path:
    """The log that a run's folder, or the path of a log itself, stands for."""
    if run.is_file():
        return run
    if (run / METRICS).is_file():
        return run / METRICS
    found = sorted(run.glob("*.jsonl"))
    if len(found) == 1:
        return found[0]
    for folder in (run, run / "tensorboard"):
        if not found and any(folder.glob(EVENTS)):
            return folder
    what = f"holds {listed(path.name for path in found)}" if run.is_dir() else "does not exist"
    raise DataError(
        f"{run} {what}; expected the .jsonl file of verl's file logger, a tensorboard folder, or a folder with "
        f"{METRICS} or with one such file (trainer.logger=[console,file] writes it, to the path in "
        "VERL_FILE_LOGGER_PATH)"
    )


def read_log(path: Path) -> Log:
    """All steps of a log: see `read_logs`."""
    return read_logs([path])


def read_logs(paths: Sequence[Path]) -> Log:
    """All steps of one run, whose parts are given in order: verl's file logger begins a new file on every start.

    Of a step that was logged twice the later values count; steps of a past that a resumed run has left are left out. A
    line that is no record is left out and counted: a killed process tears its last one.
    """
    reading, unreadable = _Reading(), 0
    for path in paths:
        for record in _events(path) if path.is_dir() else map(_record, _lines(path)):
            if record is None:
                unreadable += 1
            else:
                reading.add(*record)
    if not reading.steps:
        raise DataError(f'{paths[0]} holds no line of verl\'s file logger ({{"step": ..., "data": {{...}}}})')
    return Log(paths[-1], dict(sorted(reading.steps.items())), unreadable, tuple(reading.resumed_after))


def _lines(path: Path) -> Iterable[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.strip():
                yield line


def _record(line: str) -> tuple[int, Mapping[str, Any]] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or type(found.get("step")) is not int or not isinstance(found.get("data"), dict):
        return None
    return found["step"], found["data"]


def _events(folder: Path) -> Iterable[tuple[int, Step]]:
    """The scalars of a tensorboard folder in the order in which they were written."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
    except ImportError as error:
        raise ConfigurationError(f"{folder} is a tensorboard folder: pip install tensorboard to read it") from error
    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0}, purge_orphaned_data=False)
    events.Reload()
    written = [
        (event.wall_time, event.step, tag, event.value)
        for tag in events.Tags()[SCALARS]
        for event in events.Scalars(tag)
    ]
    for _, step, tag, value in sorted(written, key=lambda entry: entry[0]):
        yield step, {tag: value}


def _is_number(value: Any) -> bool:
    """What is not finite was not measured."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
