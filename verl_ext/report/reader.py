"""Find and read what verl's loggers wrote of a run: the `file` logger's jsonl, or a tensorboard folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ext import jsonl
from verl_ext.errors import ConfigurationError, DataError, listed
from verl_ext.report.log import Log

METRICS = "metrics.jsonl"
"""The name of the log in the folder of a run. One `.jsonl` file of another name works as well."""
EVENTS = "events.out.tfevents.*"
TAIL = 1024
"""Number of bytes before the end of the last read, compared to detect that a file was replaced."""
LARGEST_STEP = 2**63


def find_log(run: Path) -> Path:
    """Find the log of a run from its folder, or from the path of the log itself."""
    if run.is_file():
        return run
    if (run / METRICS).is_file():
        return run / METRICS
    found = sorted(run.glob("*.jsonl"))
    logs = [path for path in found if path.is_file()]
    for path in () if logs else (run, *found):
        if path.exists() and not path.is_dir():  # opening a pipe may wait for ever
            raise DataError(f"{path} is not a regular file: copy what it holds to a .jsonl file, and name that")
    if len(logs) == 1:
        return logs[0]
    for folder in (run, run / "tensorboard"):
        if not logs and any(folder.glob(EVENTS)):
            return folder
    what = f"holds {listed(path.name for path in logs)}" if run.is_dir() else "does not exist"
    raise DataError(
        f"{run} {what}; expected the .jsonl file of verl's file logger, a tensorboard folder, or a folder with "
        f"{METRICS} or with one such file ('trainer.logger=[console,file]' writes it, to the path in "
        "VERL_FILE_LOGGER_PATH)"
    )


class Reader:
    """Reads one run from its parts, in order: verl's file logger starts a new file on every start.

    Each `read` continues where the last one ended. It starts again if a part was replaced or truncated, or if a part
    other than the last has grown. A line that is not a record is skipped and counted: a killed process leaves one.
    """

    def __init__(self, parts: Sequence[Path]) -> None:
        self._parts = parts
        self._start()

    def _start(self) -> None:
        self._log = Log(self._parts[-1])
        self._ends: dict[Path, tuple[int, bytes]] = {}
        """For each file, up to where it was read, and the last bytes before that position."""
        self._folders: dict[Path, object] = {}
        """For each tensorboard folder, the sizes and times of its files."""

    def read(self, *, running: bool = False) -> Log:
        """Read what is new and return the log. If it is `running`, leave a half-written last line for the next read."""
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
        """Read what is new; return False if a part that was read before has changed."""
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
        """Read all tensorboard files once; return False if one of them has changed since."""
        files = sorted((file, file.stat().st_size, file.stat().st_mtime_ns) for file in part.glob(EVENTS))
        if part not in self._folders:
            for step, data in _events(part):
                self._log.add(step, data)
            self._folders[part] = files
        return self._folders[part] == files


def _record(line: bytes) -> tuple[int, Mapping[str, Any]] | None:
    try:
        record = jsonl.parse(line)
    except DataError:
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int or not isinstance(record.get("data"), dict):
        return None
    return (record["step"], record["data"]) if abs(record["step"]) < LARGEST_STEP else None


def _events(folder: Path) -> Iterable[tuple[int, Mapping[str, float]]]:
    """The scalars of a tensorboard folder, in the order they were written."""
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
