"""The command line of a recipe's `prepare_data.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from verl_ext.errors import DataError, VerlExtError
from verl_ext.recipes.data.convert import BadRow, Converted, convert, write
from verl_ext.recipes.data.plan import Plan, Split
from verl_ext.recipes.data.source import files_of, folder_of, read

SHOWN = 20
"""Number of bad rows to print; the report has all of them."""


def parser(description: str | None, default_folder: str) -> argparse.ArgumentParser:
    """The options of every recipe, named as in verl's own scripts."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--local_dataset_path", type=Path, metavar="PATH", help="read a clone or a folder instead of the hub"
    )
    made.add_argument("--hub_dataset", metavar="OWNER/NAME", help="another training set on the hub, in the same format")
    made.add_argument("--revision", help="revision of the data set on the hub")
    made.add_argument(
        "--local_save_dir", type=Path, default=Path(default_folder), metavar="DIR", help="default: %(default)s"
    )
    made.add_argument(
        "--skip_bad_rows", action="store_true", help="write the other rows; the report lists the bad ones"
    )
    return made


def main(plan: Plan, options: argparse.Namespace) -> int:
    """Prepare the data and return the exit status: 0 if everything was written."""
    try:
        report = prepare(plan, options)
    except VerlExtError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(report + "\n")
    return 0


def prepare(plan: Plan, options: argparse.Namespace) -> str:
    """Read, check and write every split; return the text to print."""
    if options.local_dataset_path is not None and (options.hub_dataset or options.revision):
        raise DataError(
            "--local_dataset_path excludes --hub_dataset and --revision, which are for the hub: leave out one kind"
        )
    done, sources = [], {}
    for split in plan.splits:
        converted, paths = _one(plan, split, options)
        done.append(converted)
        sources[split.name] = [str(path) for path in paths]
    bad = [row for converted in done for row in converted.bad]
    if bad and not options.skip_bad_rows:
        raise DataError(
            f"{len(bad)} of {sum(converted.read for converted in done)} rows are invalid, and nothing was written:\n"
            f"{_listing(bad)}\nFix them, or add --skip_bad_rows to write the others"
        )
    empty = [converted.split.name for converted in done if not converted.rows]
    if empty:
        raise DataError(f"no row of {', '.join(empty)} is valid:\n{_listing(bad)}")
    report = write(options.local_save_dir, done, {"data_set": plan.name, "files": sources})
    lines = [
        f"{options.local_save_dir / (converted.split.name + '.parquet')}: {len(converted.rows)} rows"
        + (f", {converted.not_asked_for} filtered out" if converted.not_asked_for else "")
        for converted in done
    ]
    if bad:
        lines.append(f"skipped {len(bad)} bad rows, all listed in {report}:\n{_listing(bad)}")
    return "\n".join(lines)


def _one(plan: Plan, split: Split, options: argparse.Namespace) -> tuple[Converted, list[Path]]:
    folder = folder_of(
        plan, split, local=options.local_dataset_path, hub=options.hub_dataset, revision=options.revision
    )
    paths = files_of(folder, split)
    records = read(paths, split)
    with tqdm(total=len(split.indices(len(records))), desc=f"{plan.name} {split.name}", unit="row") as bar:
        return convert(split, records, bar.update), paths


def _listing(bad: Sequence[BadRow]) -> str:
    lines = [f"  {row}" for row in bad[:SHOWN]]
    if len(bad) > SHOWN:
        lines.append(f"  ... and {len(bad) - SHOWN} more")
    return "\n".join(lines)
