"""Find and read the files of a data set, in a folder or on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl_ext import jsonl
from verl_ext.errors import DataError, listed
from verl_ext.recipes.data.plan import Plan, Split

READABLE = (".parquet", ".json", ".jsonl")


def folder_of(plan: Plan, split: Split, *, local: Path | None, hub: str | None, revision: str | None) -> Path:
    """The folder with the files of a split: the user's own, or a download of only those files from the hub."""
    if local is not None:
        if not local.exists():
            raise DataError(f"{local} does not exist; expected {plan.where}")
        return local
    name = split.hub or hub or plan.hub
    if name is None:
        raise DataError(
            f"{plan.name} is not on the Hugging Face hub: get {plan.where}, and name it with --local_dataset_path, or "
            "name a data set on the hub with the same files with --hub_dataset"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=list(split.files)))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError) as error:
        raise DataError(
            f"the data set {name!r} cannot be downloaded from the hub ({type(error).__name__}: {error}). Without "
            f"a network use --local_dataset_path with {plan.where}"
        ) from error


def files_of(folder: Path, split: Split) -> list[Path]:
    """The files of a split in a folder; a path to a file is returned as it is."""
    if folder.is_file():
        return [folder]
    for pattern in split.files:
        files = sorted(path for path in folder.glob(pattern) if path.suffix in READABLE)
        if files:
            return files
    there = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in READABLE)
    raise DataError(
        f"{folder} has no file for the split {split.name!r}; expected one of {', '.join(split.files)}; "
        f"found {listed(there[:20])}"
    )


def read(paths: Iterable[Path], split: Split) -> list[dict[str, Any]]:
    """Read all records, in order; raise `DataError` for a file that cannot be read or lacks a column."""
    records: list[dict[str, Any]] = []
    for path in paths:
        content = _read_one(path)
        for index, record in enumerate(content):
            missing = set(split.columns) - set(record) if isinstance(record, dict) else set(split.columns)
            if missing:
                has = f"columns {listed(record)}" if isinstance(record, dict) else f"{str(record)[:200]!r}"
                raise DataError(
                    f"{path}, row {index}: no column {listed(missing)}; expected {listed(split.columns)}; found {has}"
                )
        records += content
    if not records:
        raise DataError(f"{listed(paths)} hold no rows")
    return records


def _read_one(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".jsonl":
        return [_parse(line, f"{path}, line {number}") for number, line in jsonl.lines(path)]
    if path.suffix == ".json":
        content = _parse(path.read_bytes(), str(path))
        if not isinstance(content, list):
            raise DataError(f"{path} must hold a list of records, found {type(content).__name__}")
        return content
    raise DataError(f"{path}: expected one of {', '.join(READABLE)}")


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        hint = "; if it is a Git LFS pointer, run `git lfs pull`" if path.stat().st_size < 1000 else ""
        raise DataError(f"{path} is not a readable parquet file ({error}){hint}") from error
    return rows


def _parse(content: bytes, where: str) -> Any:
    try:
        return jsonl.parse(content)
    except DataError as error:
        raise DataError(f"{where} is not valid JSON: {error}") from error
