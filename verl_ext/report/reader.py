"""Find and read what verl's loggers wrote of a run: the `file` logger's jsonl, or a tensorboard folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ext import jsonl
from verl_ext.errors import ConfigurationError, DataError, listed
from verl_ext.report.log import Log

METRICS = "metrics.jsonl"
"""The log's name in a run's folder, unless the folder holds one `.jsonl` file of another name."""
EVENTS = "events.out.tfevents.*"
TAIL = 1024
"""Bytes before the place up to which a file was read, by which it is known to be still the same."""
LARGEST_STEP = 2**63


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


class Reader:
    """Reads one run from its parts, in order: verl's file logger begins a new file on every start.

    Every `read` goes on where the one before ended. It starts again if a part was replaced or cut off, or if a part
    other than the last has grown. A line that is not a record is left out and counted: a killed process tears one.
    """

    def __init__(self, parts: Sequence[Path]) -> None:
        self._parts = parts
        self._start()

    def _start(self) -> None:
        self._log = Log(self._parts[-1])
        self._ends: dict[Path, tuple[int, bytes]] = {}
        """For each file, how far it was read, and the last bytes before that place."""
        self._folders: dict[Path, object] = {}
        """For each tensorboard folder, the sizes and times of its files."""

    def read(self, *, running: bool = False) -> Log:
        """The log as it is now. In a `running` training the last line may be half written, and is left for later."""
        try:
            if not self._go_on(running=running):
                self._start()
                self._go_on(running=running)
        except OSError as error:
            self._start()
            raise DataError(f"{self._parts[-1]} cannot be read: {error}") from error
        if not len(self._log.steps):
            raise DataError(f'{self._parts[0]} holds no line of verl\'s file logger ({{"step": ..., "data": {{...}}}})')
        return self._log

    def _go_on(self, *, running: bool) -> bool:
        """Read what is new; False if what was read before is no longer there."""
        return all(
            self._folder(part) if part.is_dir() else self._file(part, running=running and part is self._parts[-1])
            for part in self._parts
        )

    def _file(self, part: Path, *, running: bool) -> bool:
        ended = part in self._ends and part is not self._parts[-1]
        end, tail = self._ends.get(part, (0, b""))
        with part.open("rb") as file:
            file.seek(end - len(tail))
            if file.read(len(tail)) != tail:
                return False
            for line in file:
                record = _record(line) if line.strip() else ()
                if record is None and running and not line.endswith(b"\n"):
                    break
                if ended:
                    return False
                if record:
                    self._log.add(*record)
                self._log.unreadable += record is None
                end, tail = end + len(line), (tail + line)[-TAIL:]
        self._ends[part] = end, tail
        return True

    def _folder(self, part: Path) -> bool:
        """Tensorboard's files are read as a whole, when one of them has changed."""
        found = sorted((file, file.stat().st_size, file.stat().st_mtime_ns) for file in part.glob(EVENTS))
        if part not in self._folders:
            for step, data in _events(part):
                self._log.add(step, data)
            self._folders[part] = found
        return self._folders[part] == found


def read_logs(parts: Sequence[Path]) -> Log:
    """The log of one run, whose parts are given in order."""
    return Reader(parts).read()


def _record(line: bytes) -> tuple[int, Mapping[str, Any]] | None:
    try:
        found = jsonl.parse(line)
    except DataError:
        return None
    if not isinstance(found, dict) or type(found.get("step")) is not int or not isinstance(found.get("data"), dict):
        return None
    return (found["step"], found["data"]) if abs(found["step"]) < LARGEST_STEP else None


def _events(folder: Path) -> Iterable[tuple[int, Mapping[str, float]]]:
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
