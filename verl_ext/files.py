"""Write and read files, print what was read from them, and end a process so that its files are closed."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from verl_ext.errors import SignalExit

Table = list[tuple[str, ...]]
"""A table as rows of text. The first row is the header."""
METRICS = "metrics.jsonl"
"""The log of a run, which holds no trajectories."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path. If the block ends without an error, it replaces `path` and is synced to disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder) / "a.txt") as temporary:
    ...         _ = temporary.write_text("whole")
    ...     (Path(folder) / "a.txt").read_text()
    'whole'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Sync renames and deletions in a folder to disk, if the file system supports it."""
    with suppress(OSError):
        _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_lines(file: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the record of each line, or None for a truncated line, which a killed process leaves."""
    with file.open("rb") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield record if isinstance(record, dict) else None


def exit_on_signals() -> None:
    """End this process cleanly at a signal: files and pipes are closed, and the exit status is 128 + the number."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _exit_on_signal)


def _exit_on_signal(number: int, _frame: object) -> None:
    raise SignalExit(128 + number)


def say(text: str, file: TextIO | None = None) -> None:
    r"""Print a text. Control characters, which names from files may contain, are escaped.

    >>> say("reward \x1b[31m")
    reward \x1b[31m
    """
    shown = (sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in text)
    print("".join(shown), file=file, flush=True)


def aligned(rows: Table) -> str:
    """Return a table as text with aligned columns and a line below the header.

    >>> print(aligned([("a", "b"), ("10", "2")]))
    a   b
    -----
    10  2
    """
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    rule = "-" * len("  ".join(" " * width for width in widths))
    return "\n".join([lines[0], rule, *lines[1:]])
