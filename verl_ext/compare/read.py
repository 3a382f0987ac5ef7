"""Read rollouts: verl's JSON lines or dumped advantages."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from pathlib import Path

from verl_ext.compare import dumps, lines
from verl_ext.compare.rollouts import Rollouts
from verl_ext.errors import DataError
from verl_ext.files import DUMPS
from verl_ext.report.reader import METRICS

DEPTH, MOST = 3, 10
"""How far below a folder without rollouts they are looked for, and how many folders are named."""


def read(path: Path, wanted: Collection[str], *, length: str | None = None) -> Rollouts:
    """Read the rewards in `wanted` from a file or a folder, and the lengths from the entry `length`."""
    if path.is_dir():
        texts, tables = sorted(_files(path, lines.PATTERN)), sorted(_files(path, DUMPS))
        if not texts and not tables:
            raise DataError(
                f"{path} holds neither {lines.PATTERN} (verl's trainer.rollout_data_dir and validation_data_dir; "
                f"{METRICS} is a run's log) nor {DUMPS} (algorithm.verl_ext.dump_dir){_below(path)}"
            )
        if texts and tables:
            raise DataError(f"{path} holds {lines.PATTERN} and {DUMPS}: move one kind to a folder of its own")
        return lines.read(path, texts, wanted, length) if texts else dumps.read(path, length)
    if not path.exists():
        raise DataError(f"{path} does not exist")
    return dumps.read(path, length) if path.suffix == ".parquet" else lines.read(path, [path], wanted, length)


def files(path: Path) -> list[Path]:
    """The files that `read` reads: one, or those of a folder."""
    return [*_files(path, lines.PATTERN), *_files(path, DUMPS)] if path.is_dir() else [path]


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    return (file for file in folder.glob(pattern) if file.name != METRICS)


def _below(path: Path) -> str:
    """The line to type for each subfolder that holds rollouts."""
    patterns = ("*/" * depth + kind for depth in range(1, DEPTH + 1) for kind in (lines.PATTERN, DUMPS))
    folders = {file.parent for pattern in patterns for file in _files(path, pattern)}
    first = sorted(folders)[:MOST]
    typed = "".join(f"\n  python -m verl_ext compare {shlex.quote(str(folder))} ..." for folder in first)
    return f"; subfolders have such files:{typed}" if typed else ""
