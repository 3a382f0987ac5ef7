"""Read rollouts: verl's JSON lines or dumped advantages."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from verl_ext.compare import dumps, lines
from verl_ext.compare.rollouts import Rollouts
from verl_ext.errors import DataError
from verl_ext.report.reader import METRICS

DEPTH, MOST = 3, 10
"""How far below a folder without rollouts they are looked for, and how many folders are named."""


def read(path: Path, wanted: Collection[str], *, length: str | None = None) -> Rollouts:
    """Read the rewards in `wanted` from a file or a folder, and the lengths from the entry `length`."""
    if path.is_dir():
        files = {kind: sorted(_files(path, kind)) for kind in (lines, dumps)}
        if not any(files.values()):
            raise DataError(
                f"{path} holds neither {lines.PATTERN} (verl's trainer.rollout_data_dir and validation_data_dir; "
                f"{METRICS} is a run's log) nor {dumps.PATTERN} (algorithm.verl_ext.dump_dir){_below(path)}"
            )
        if all(files.values()):
            raise DataError(f"{path} holds {lines.PATTERN} and {dumps.PATTERN}: move one kind to a folder of its own")
        return lines.read(path, files[lines], wanted, length) if files[lines] else dumps.read(path, length)
    if not path.exists():
        raise DataError(f"{path} does not exist")
    return dumps.read(path, length) if path.suffix == ".parquet" else lines.read(path, [path], wanted, length)


def _files(folder: Path, kind: ModuleType, below: str = "") -> Iterator[Path]:
    return (file for file in folder.glob(f"{below}{kind.PATTERN}") if file.name != METRICS)


def _below(path: Path) -> str:
    """The line to type for each subfolder that holds rollouts."""
    depths = ("*/" * depth for depth in range(1, DEPTH + 1))
    folders = {file.parent for below in depths for kind in (lines, dumps) for file in _files(path, kind, below)}
    first = sorted(folders)[:MOST]
    typed = "".join(f"\n  python -m verl_ext compare {shlex.quote(str(folder))} ..." for folder in first)
    return f"; subfolders have such files:{typed}" if typed else ""


def texts(rollouts: Rollouts, rows: Sequence[int]) -> dict[int, tuple[str, str]]:
    """The input and the output of some rows, read from their files again; empty where the files have no text."""
    return {} if rollouts.source is None else lines.texts(rollouts.source, rows)
