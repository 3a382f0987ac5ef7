"""Read rollouts: verl's JSON lines or dumped advantages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from verl_ext.compare import dumps, lines
from verl_ext.compare.rollouts import Rollouts
from verl_ext.errors import DataError


def read(path: Path, wanted: Collection[str], *, length: str | None = None) -> Rollouts:
    """Read the rewards in `wanted` from a file or a folder, and the lengths from the entry `length`."""
    if path.is_dir():
        files = {kind: sorted(path.glob(kind.PATTERN)) for kind in (lines, dumps)}
        if not any(files.values()):
            raise DataError(
                f"{path} holds neither {lines.PATTERN} (verl's trainer.rollout_data_dir and validation_data_dir) nor "
                f"{dumps.PATTERN} (algorithm.verl_ext.dump_dir)"
            )
        if all(files.values()):
            raise DataError(f"{path} holds {lines.PATTERN} and {dumps.PATTERN}: move one kind to a folder of its own")
        return lines.read(path, files[lines], wanted, length) if files[lines] else dumps.read(path, length)
    if not path.exists():
        raise DataError(f"{path} does not exist")
    return dumps.read(path, length) if path.suffix == ".parquet" else lines.read(path, [path], wanted, length)


def texts(rollouts: Rollouts, rows: Sequence[int]) -> dict[int, tuple[str, str]]:
    """The input and the output of some rows, read from their files again; empty where the files have no text."""
    return {} if rollouts.source is None else lines.texts(rollouts.source, rows)
