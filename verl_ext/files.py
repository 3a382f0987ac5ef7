"""Write files, atomically or with a clear error, and find them below a folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from verl_ext.errors import ConfigurationError

DUMPS = "advantages-*.parquet"
"""The files of `algorithm.verl_ext.dump_dir`."""

DEPTH, MOST = 3, 10
"""How far below a folder without the files they are looked for, and how many folders are named."""


def below(folder: Path, patterns: Sequence[str], command: str, *, but: str | None = None) -> str:
    """The end of a message: the line to type for each subfolder that holds such files; "" without one.

    A file called `but` does not count.
    """
    deep = ("*/" * depth + pattern for depth in range(1, DEPTH + 1) for pattern in patterns)
    found = sorted({file.parent for pattern in deep for file in folder.glob(pattern) if file.name != but})
    typed = "".join(f"\n  python -m verl_ext {command.format(shlex.quote(str(each)))}" for each in found[:MOST])
    return f"; subfolders have such files:{typed}" if typed else ""


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
    try:
        _sync(folder)
    except OSError:
        return


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write(path: Path, text: str) -> None:
    """Write a text file."""
    with writing(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of a file; turn an error of the file system in the block into one that names the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error}") from error
