"""Convert a published data set to verl's parquet files. The `prepare_data.py` of each recipe uses this module.

A recipe defines a `Plan` and calls `main`. Every row is checked, and its ground truth is parsed by the reward function.
Invalid rows are reported with their index and the reason. If there are invalid rows, nothing is written unless the
user skips these rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.errors import DataError, VerlExtError
from verl_ext.files import replacing

Record = Mapping[str, Any]
"""One example of the data set."""
Row = dict[str, Any]
"""One example as verl reads it."""
READABLE = (".parquet", ".json", ".jsonl")
SHOWN = 20
"""Number of invalid rows to print. The report lists all of them."""


@dataclass(frozen=True)
class Split:
    """One file to write, `<name>.parquet`."""

    name: str
    files: tuple[str, ...]
    """Patterns below the folder of the data set. The files of the first matching pattern are read, sorted by name."""
    columns: tuple[str, ...]
    """Columns that every record must have."""
    make_row: Callable[[Record, int], Row | None]
    """Converts a record and its index to a row, or to None to filter it out. An invalid record raises `DataError`."""
    hub: str | None = None
    """The data set on the Hugging Face Hub. None: the data set of the plan."""
    rows: Callable[[int], Sequence[int]] = range
    """Maps the number of records to the indices of the split, in the order in which they are written."""


@dataclass(frozen=True)
class Plan:
    """A data set: its location, and how it is converted."""

    name: str
    splits: tuple[Split, ...]
    hub: str | None
    """The data set on the Hugging Face Hub. None: the data set is not on the Hub."""
    where: str
    """What a user has to download, for messages."""


def row(*, source: str, prompt: Sequence[dict[str, str]], truth: str, split: str, index: int, **more: Any) -> Row:
    """Make a row in verl's format, or raise `DataError` for an invalid prompt. `more` goes into `extra_info`."""
    if not prompt:
        raise DataError("the prompt has no messages")
    for message in prompt:
        content = message.get("content")
        if not isinstance(message.get("role"), str) or not isinstance(content, str) or not content.strip():
            raise DataError(f"a message of the prompt must have a role and a text, found {str(message)[:200]}")
    return {
        "data_source": source,
        "prompt": [{"role": message["role"], "content": message["content"]} for message in prompt],
        "ability": "math",  # ToolRL's files have it as well
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, **more},
    }


def text(record: Record, column: str) -> str:
    """Return the stripped text of a column, or raise `DataError` if there is no text."""
    value = record[column]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"column {column!r} must be a non-empty string, found {str(value)[:200]!r}")
    return value.strip()


def parser(description: str | None, folder: str) -> argparse.ArgumentParser:
    """Return the parser with the options of every recipe, which are named as in verl's own scripts."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--local_dataset_path",
        type=Path,
        metavar="PATH",
        help="local clone or folder to read instead of the Hugging Face Hub",
    )
    made.add_argument(
        "--hub_dataset", metavar="OWNER/NAME", help="another training set on the Hugging Face Hub, in the same format"
    )
    made.add_argument("--revision", help="revision of the data set on the Hugging Face Hub")
    made.add_argument(
        "--local_save_dir",
        type=Path,
        default=Path(folder),
        metavar="DIR",
        help="output folder (default: %(default)s)",
    )
    made.add_argument(
        "--skip_bad_rows", action="store_true", help="skip invalid rows and write the rest; prepared.json lists them"
    )
    return made


def main(plan: Plan, options: argparse.Namespace) -> int:
    """Prepare the data, and return the exit status: 0 if everything was written."""
    try:
        print(prepare(plan, options))
    except VerlExtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def prepare(plan: Plan, options: argparse.Namespace) -> str:
    """Read, check and write every split, and return the text to print."""
    rows: dict[str, list[Row]] = {}
    files: dict[str, list[str]] = {}
    counts: dict[str, dict[str, Any]] = {}
    bad: list[str] = []
    for split in plan.splits:
        paths = find(folder_of(plan, split, options), split)
        files[split.name] = [str(path) for path in paths]
        rows[split.name], counts[split.name] = convert(
            split, [record for path in paths for record in read(path, split)]
        )
        bad += [f"  {split.name} row {each['index']}: {each['reason']}" for each in counts[split.name]["bad_rows"]]
    listing = "\n".join(bad[:SHOWN] + ([f"  ... and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else []))
    if bad and not options.skip_bad_rows:
        total = sum(count["read"] for count in counts.values())
        raise DataError(
            f"{len(bad)} of {total} rows are invalid, and nothing was written:\n{listing}\n"
            "Fix these rows in the data set, or add --skip_bad_rows to write the other rows."
        )
    if empty := [name for name in rows if not rows[name]]:
        reasons = f":\n{listing}" if bad else ", because every row was filtered out."
        raise DataError(f"the split {', '.join(empty)} has no valid row{reasons}")
    folder = options.local_save_dir
    write(folder, rows, {"data_set": plan.name, "files": files, "splits": counts})
    lines = [
        f"{folder / name}.parquet: {len(rows[name])} rows written, {counts[name]['filtered']} rows filtered out"
        for name in rows
    ]
    if bad:
        lines.append(
            f"warning: {len(bad)} invalid rows were skipped. {folder / 'prepared.json'} lists all of them:\n{listing}"
        )
    return "\n".join(lines)


def folder_of(plan: Plan, split: Split, options: argparse.Namespace) -> Path:
    """Return the folder with the files of a split: the user's folder, or a download of these files from the Hub."""
    local = options.local_dataset_path
    if local is not None:
        if options.hub_dataset or options.revision:
            raise DataError(
                "--local_dataset_path cannot be combined with --hub_dataset or --revision. Remove --local_dataset_path "
                "or the other two options."
            )
        if not local.exists():
            raise DataError(f"{local} does not exist. Set --local_dataset_path to {plan.where}.")
        return Path(local)
    name = split.hub or options.hub_dataset or plan.hub
    if name is None:
        raise DataError(
            f"{plan.name} is not on the Hugging Face Hub. Download {plan.where}, and add --local_dataset_path FOLDER."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(name, repo_type="dataset", revision=options.revision, allow_patterns=list(split.files))
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError) as error:
        raise DataError(
            f"{name!r} cannot be downloaded ({type(error).__name__}: {error}). Without network access, get "
            f"{plan.where}, and add --local_dataset_path FOLDER."
        ) from error


def find(folder: Path, split: Split) -> list[Path]:
    """Return the files of a split in a folder, or the path itself if it is a file."""
    if folder.is_file():
        return [folder]
    for pattern in split.files:
        if files := sorted(path for path in folder.glob(pattern) if path.suffix in READABLE):
            return files
    raise DataError(
        f"{folder} has no file for the split {split.name!r}. Set --local_dataset_path to a folder with one of "
        f"{', '.join(split.files)}."
    )


def read(path: Path, split: Split) -> list[Record]:
    """Read the records of a file, or raise `DataError` if the file is damaged or a record lacks a column."""
    import pyarrow
    import pyarrow.parquet

    try:
        if path.suffix == ".parquet":
            records = pyarrow.parquet.read_table(path).to_pylist()
        elif path.suffix == ".json":
            records = json.loads(path.read_bytes())
        else:
            records = [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]
    except (pyarrow.ArrowException, ValueError) as error:
        pointer = path.stat().st_size < 1000
        remedy = "If it is a Git LFS pointer, run `git lfs pull`." if pointer else "Download the file again."
        raise DataError(f"{path} cannot be read ({error}). {remedy}") from error
    for index, record in enumerate(records):
        if missing := set(split.columns) - set(record):
            raise DataError(
                f"row {index} of {path} lacks the column {', '.join(sorted(missing))}. Its columns are "
                f"{', '.join(record)}. Use a data set in the format of the recipe."
            )
    return list(records)


def convert(split: Split, records: Sequence[Record]) -> tuple[list[Row], dict[str, Any]]:
    """Make the rows of a split, and the counts for the report. The indices are those of the data set."""
    from tqdm import tqdm

    rows: list[Row] = []
    bad: list[dict[str, Any]] = []
    chosen = split.rows(len(records))
    for index in tqdm(chosen, desc=split.name, unit="row"):
        try:
            made = split.make_row(records[index], index)
        except DataError as error:
            bad.append({"index": index, "reason": str(error)})
        else:
            rows += [] if made is None else [made]
    filtered = len(chosen) - len(rows) - len(bad)
    return rows, {"read": len(chosen), "written": len(rows), "filtered": filtered, "bad": len(bad), "bad_rows": bad}


def write(folder: Path, rows: Mapping[str, list[Row]], report: Mapping[str, Any]) -> None:
    """Write each split and then the report. Each file is written completely or not at all."""
    import pyarrow
    import pyarrow.parquet

    for name, of_split in rows.items():
        with replacing(folder / f"{name}.parquet") as temporary:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(of_split), temporary)
    with replacing(folder / "prepared.json") as temporary:
        temporary.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", "utf-8")
