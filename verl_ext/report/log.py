"""Read the log of verl's `file` logger: one `{"step": ..., "data": {metric: value}}` a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.errors import DataError, listed

METRICS = "metrics.jsonl"
"""The log's name in a run's folder, unless the folder holds one `.jsonl` file of another name."""

Step = dict[str, float]


@dataclass(frozen=True)
class Log:
    """The metrics of a run by step, in order, and how many lines could not be read."""

    path: Path
    steps: Mapping[int, Step]
    unreadable: int = 0

    @property
    def metrics(self) -> set[str]:
        """Names of all metrics of any step."""
        return set().union(*self.steps.values())


def find_log(run: Path) -> Path:
    """The log that a run's folder, or the path of a log itself, stands for."""
    if run.is_file():
        return run
    if (run / METRICS).is_file():
        return run / METRICS
    found = sorted(run.glob("*.jsonl"))
    if len(found) == 1:
        return found[0]
    what = f"holds {listed(path.name for path in found)}" if run.is_dir() else "does not exist"
    raise DataError(
        f"{run} {what}; expected the .jsonl file of verl's file logger, or a folder with {METRICS} or with one such "
        "file (trainer.logger=[console,file] writes it, to the path in VERL_FILE_LOGGER_PATH)"
    )


def read_log(path: Path) -> Log:
    """All steps of a log. Of a step that was logged twice, as after a resume, the later values count.

    A line that is no record is left out and counted: a killed process tears its last one.
    """
    steps: dict[int, Step] = {}
    unreadable = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.strip():
            continue
        record = _record(line)
        if record is None:
            unreadable += 1
        else:
            steps.setdefault(record[0], {}).update(record[1])
    if not steps:
        raise DataError(f'{path} holds no line of verl\'s file logger ({{"step": ..., "data": {{...}}}})')
    return Log(path, dict(sorted(steps.items())), unreadable)


def _record(line: str) -> tuple[int, Step] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or type(found.get("step")) is not int or not isinstance(found.get("data"), dict):
        return None
    return found["step"], {name: float(value) for name, value in found["data"].items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
