"""Find the rollouts in a file or a folder, and read them: dumps of verl_ext, or tables."""

from __future__ import annotations

import re
from pathlib import Path

from verl_ext.errors import DataError, listed
from verl_ext.files import METRICS
from verl_ext.tools.compare.dumps import read_dumps
from verl_ext.tools.compare.rollouts import Rollouts
from verl_ext.tools.compare.tables import read_tables

DUMPS = "advantages-*.parquet"
TABLES = (".parquet", ".jsonl", ".csv")


def read_rollouts(path: Path, prompt: str | None = None) -> Rollouts:
    """Read a file, or the files of a folder. If a folder contains dumps, its tables are not read.

    `prompt` names the column of the prompt in a table; by default it is the column that verl writes.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist. Use the path of a file or folder with scored responses.")
    dumps = _dumps(path)
    if dumps and prompt in (None, "uid"):  # a dump has its prompts in `uid`
        return read_dumps(path, dumps)
    tables = _tables(path)
    if tables:
        return read_tables(path, tables, prompt)
    if path.is_file():
        raise DataError(
            f"compare cannot read {path}, because its suffix is {path.suffix!r}. Use a file with one row per "
            f"response and one of the suffixes {', '.join(TABLES)}."
        )
    raise DataError(f"{path} contains no rollouts ({DUMPS}, *{', *'.join(TABLES)}). {_other_folder(path)}")


def _dumps(path: Path) -> list[Path]:
    """Return the dumps in a folder and in its subfolders `from-<step>-<n>`, or the file itself if it is a dump."""
    if path.is_file():
        return [path] if path.match(DUMPS) else []
    files = sorted(path.glob(DUMPS))
    for file in sorted(path.glob(f"from-*/{DUMPS}")):
        if re.fullmatch(r"from-\d+-\d+", file.parent.name):
            files.append(file)
    return files


def _tables(path: Path) -> list[Path]:
    """Return the tables in a folder, or the file itself if it is a table."""
    if path.is_file():
        return [path] if _is_table(path) else []
    return [file for file in sorted(path.iterdir()) if _is_table(file) and file.name != METRICS]


def _is_table(file: Path) -> bool:
    return file.suffix.lower() in TABLES


def _other_folder(path: Path) -> str:
    """Return a hint that names subfolders with rollouts."""
    subfolders = [folder for folder in path.iterdir() if folder.is_dir()]
    with_rollouts = {str(folder) for folder in subfolders if _dumps(folder) or _tables(folder)}
    if with_rollouts:
        return f"Use one of its subfolders that contain rollouts: {listed(with_rollouts)}."
    return (
        "Use a folder that algorithm.verl_ext.dump_dir, trainer.rollout_data_dir or trainer.validation_data_dir names."
    )
