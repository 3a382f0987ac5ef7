"""Read rollouts: verl's JSON lines or dumped advantages."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from verl_ext.compare import dumps, lines
from verl_ext.compare.rollouts import Rollouts
from verl_ext.errors import DataError
from verl_ext.files import DUMPS, below
from verl_ext.report.reader import METRICS


def read(path: Path, wanted: Collection[str], *, length: str | None = None) -> Rollouts:
    """Read the rewards in `wanted` from a file or a folder, and the lengths from the entry `length`."""
    if path.is_dir():
        texts, tables = sorted(_files(path, lines.PATTERN)), sorted(_files(path, DUMPS))
        if not texts and not tables:
            subfolders = below(path, (lines.PATTERN, DUMPS), "compare {} ...", but=METRICS)
            raise DataError(
                f"{path} holds neither {lines.PATTERN} (verl's trainer.rollout_data_dir and validation_data_dir; "
                f"{METRICS} is a run's log) nor {DUMPS} (algorithm.verl_ext.dump_dir){subfolders}"
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
