"""Convert records to checked rows, and write them to files."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.errors import DataError
from verl_ext.recipes.data.plan import Record, Row, Split

REPORT = "prepared.json"


@dataclass(frozen=True)
class BadRow:
    """An invalid record: its place, and the reason."""

    split: str
    index: int
    reason: str

    def __str__(self) -> str:
        return f"{self.split} row {self.index}: {self.reason}"


@dataclass(frozen=True)
class Converted:
    """The rows of a split."""

    split: Split
    read: int
    rows: Sequence[Row]
    bad: Sequence[BadRow]
    not_asked_for: int = 0


def convert(split: Split, records: Sequence[Record], advance: Callable[[], object] = lambda: None) -> Converted:
    """Make a row for each record of the split. Indices are those of the data set, before `split.rows` selects."""
    rows: list[Row] = []
    bad: list[BadRow] = []
    others = 0
    chosen = split.indices(len(records))
    for index in chosen:
        try:
            if split.keep(records[index]):
                rows.append(split.make_row(records[index], index))
            else:
                others += 1
        except DataError as error:
            bad.append(BadRow(split.name, index, str(error)))
        advance()
    return Converted(split, len(chosen), rows, bad, others)


def write(folder: Path, done: Sequence[Converted], about: Mapping[str, Any]) -> Path:
    """Write `<split>.parquet` for each split, and the report, each atomically; return the path of the report."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as scratch:
        for converted in done:
            table = pyarrow.Table.from_pylist(list(converted.rows))
            pyarrow.parquet.write_table(table, Path(scratch) / f"{converted.split.name}.parquet")
        report = {**about, "splits": {converted.split.name: _counts(converted) for converted in done}}
        text = json.dumps(report, indent=2, ensure_ascii=False) + "\n"
        (Path(scratch) / REPORT).write_text(text, encoding="utf-8")
        for path in sorted(Path(scratch).iterdir(), key=lambda path: path.name == REPORT):  # the report last
            os.replace(path, folder / path.name)
    return folder / REPORT


def _counts(converted: Converted) -> dict[str, Any]:
    bad = [{"index": row.index, "reason": row.reason} for row in converted.bad]
    counts = {"read": converted.read, "written": len(converted.rows), "not_asked_for": converted.not_asked_for}
    return {**counts, "bad": len(bad), "bad_rows": bad}
