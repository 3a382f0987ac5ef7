"""Read dumps of verl_ext, the JSON lines that verl writes, or a table with any column names."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ext.core.groups import Array
from verl_ext.core.schema import parse_dataclass
from verl_ext.errors import DataError, listed, reading, unknown
from verl_ext.files import METRICS, json_lines
from verl_ext.registry import INSTALLED
from verl_ext.settings import Settings
from verl_ext.tools.compare.rollouts import RESPONSES, SCORE, SUM, TOKENS, About, Rollouts

if TYPE_CHECKING:
    import pandas as pd

DUMPS = "advantages-*.parquet"
TABLES = (".parquet", ".jsonl", ".csv")


def read_rollouts(path: Path, prompt: str | None = None) -> Rollouts:
    """Read a file, or the files of a folder. If a folder contains dumps, its tables are not read.

    `prompt` names the column of the prompt in a table; by default it is the column that verl writes.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist. Use the path of a file or folder with scored responses.")
    if prompt is None and (dumps := _dumps(path)):
        return _read_dumps(path, dumps)
    if path.is_file():
        if not _is_table(path):
            raise DataError(
                f"compare cannot read {path}, because its suffix is {path.suffix!r}. Use a file with one row per "
                f"response and one of the suffixes {', '.join(TABLES)}."
            )
        return _read_tables(path, [path], prompt)
    files = _tables(path)
    if files:
        return _read_tables(path, files, prompt)
    below = {str(folder) for folder in path.glob("*") if folder.is_dir() and (_dumps(folder) or _tables(folder))}
    fix = (
        "Use a folder that algorithm.verl_ext.dump_dir, trainer.rollout_data_dir or trainer.validation_data_dir names."
    )
    if below:
        fix = f"Use one of its subfolders, which do: {listed(below)}."
    raise DataError(f"{path} contains no rollouts ({DUMPS}, *{', *'.join(TABLES)}). {fix}")


def _dumps(path: Path) -> list[Path]:
    """Return the dumps in a folder and in its subfolders `from-<step>-<n>`, or the file itself if it is a dump."""
    if path.is_dir():
        starts = path.glob(f"from-*/{DUMPS}")
        return [*path.glob(DUMPS), *(file for file in starts if re.fullmatch(r"from-\d+-\d+", file.parent.name))]
    return [path] if path.match(DUMPS) else []


def _tables(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.iterdir()) if _is_table(file) and file.name != METRICS]


def _is_table(file: Path) -> bool:
    return file.suffix.lower() in TABLES


def _read_dumps(path: Path, files: Sequence[Path]) -> Rollouts:
    """Read the dumps of the latest start, and for earlier steps those of the start from which it resumed."""
    import pandas as pd
    import pyarrow
    import pyarrow.parquet

    starts: dict[Path, dict[tuple[int, int], tuple[pd.DataFrame, About]]] = {}
    notes = []
    for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, file)):
        try:
            table = pyarrow.parquet.read_table(file)
        except (OSError, pyarrow.ArrowException) as error:
            notes.append(f"{file} is skipped, because it cannot be read: {str(error).splitlines()[0]}")
            continue
        metadata = (table.schema.metadata or {}).get(b"verl_ext")
        if metadata is None:
            notes.append(f"{file} is skipped, because it has no metadata `verl_ext`, which every dump of verl_ext has.")
            continue
        with reading(file):
            about = parse_dataclass(About, json.loads(metadata), f"{file}: verl_ext")
        if file.parent in starts and (other := [*starts][-1]) != file.parent:
            raise DataError(
                f"By the modification times of their files, {file.parent} and {other} were written by two runs at the "
                "same time. Use one of the two folders, and set another algorithm.verl_ext.dump_dir for each run. If a "
                "copy of the files has lost the times, copy them again with `cp -a`."
            )
        starts.setdefault(file.parent, {})[about.step, about.update] = table.to_pandas(), about
    if not starts:
        raise DataError("\n".join([f"No {DUMPS} in {path} can be read.", *notes]))
    runs: list[dict[tuple[int, int], tuple[pd.DataFrame, About]]] = [{}]
    for folder, own in starts.items():
        begin = int(folder.name.split("-")[1]) if folder.parent == path else 0
        reached = [run for run in runs if max(run, default=(0, 0))[0] >= begin]
        runs.append({key: update for key, update in (reached or runs)[-1].items() if key[0] <= begin} | own)
    updates = dict(sorted(runs[-1].items()))
    for folder, own in starts.items():
        if gone := sorted(key[0] for key, update in own.items() if updates.get(key) is not update):
            steps = f"step {gone[0]}" if gone[0] == gone[-1] else f"steps {gone[0]} to {gone[-1]}"
            notes.append(
                f"Skipped {steps} of {folder}. By the modification times of the files, the latest start of the run did "
                "not resume from there."
            )
    frame = pd.concat([table for table, _ in updates.values()], ignore_index=True)
    _require(path, frame.reindex(columns=["step", "update", "uid"]).isna().rename(columns=repr))
    last = updates[max(updates)][1]
    abouts = [replace(about, step=last.step, update=last.update) for _, about in updates.values()]
    if others := len(abouts) - abouts.count(last):
        notes.append(
            f"{others} of {len(updates)} updates had other settings than the last update, whose settings are used here."
        )
    numeric = [name for name in frame if name.startswith("reward/") and frame[name].dtype.kind in "biuf"]
    keys = [name.partition("/")[2] for name in numeric]
    seen = {key: frame[f"reward/{key}"].astype(float) for key in keys}
    # Without conditions, the estimator saw the rewards as they were scored, and there are no columns `raw/<key>`.
    raw = {key: frame.get(f"raw/{key}", values).fillna(values).to_numpy(float) for key, values in seen.items()}
    total = next(name for name in ("total", SCORE, "sum") if name not in seen)
    run = Settings.parse(last.algorithm).rewards
    weights = dict(zip(run.keys or (), run.weights or (), strict=False)) if last.estimator in INSTALLED else {}
    parts = {key: values.to_numpy(float) * weights.get(key, 1.0) for key, values in seen.items()}
    totals = {total: frame["total"].to_numpy(float)}
    lengths, unit = _lengths(frame)
    outputs = {"outputs": frame["outputs"].to_numpy(float)} if "outputs" in frame else {}
    return Rollouts(
        path=path,
        table=frame,
        rewards=raw | totals,
        parts=parts | totals,
        weights=weights,
        total=total,
        counts={"lengths": lengths, **outputs},
        unit=unit,
        run=last,
        notes=tuple(notes),
    )


def _read_tables(path: Path, files: Sequence[Path], prompt: str | None) -> Rollouts:
    """Read tables with one row per response. If a trajectory has several outputs, the last one has the reward."""
    import pandas as pd

    frame = pd.concat(_table(file, {name for name in (prompt, "uid", "input", "gts") if name}) for file in files)
    torn = frame.isna().all(axis=1)
    frame = frame[~torn].reset_index(drop=True)
    if frame.empty:
        raise DataError(f"{path} contains no readable rows. Use a table with one row per response.")
    if set(frame) == {"step", "data"}:
        raise DataError(
            f"{path} is a log of metrics and contains no responses. Use `python -m verl_ext report {path}`."
        )
    if prompt is not None and prompt not in frame:
        raise DataError(f"--prompt: {unknown('column', prompt, frame)}.")
    question = prompt or next((name for name in ("uid", "input") if name in frame), None)
    if question is None:
        raise DataError(
            f"{path} has no column 'uid' or 'input', so it is not known which responses belong to the same prompt. Set "
            f"--prompt to the column that identifies the prompt. The columns are {listed(frame)}."
        )
    steps = _numbers(frame["step"]) if "step" in frame else np.zeros(len(frame))
    with np.errstate(invalid="ignore"):
        whole = steps.astype(int)
    missing = {repr(question): frame[question].isna(), "whole number in 'step'": whole != steps}
    _require(path, pd.DataFrame(missing))
    prompts = frame[question]
    if prompt is None and question == "input" and "gts" in frame:  # the same text may come with different images
        prompts = pd.Series(zip(prompts, frame["gts"], strict=True))
    lengths, unit = _lengths(frame)
    others = sorted(set(frame) - {question, "uid", "input", "output", "gts", "step", TOKENS})
    table = pd.DataFrame({"step": whole, "update": 0, "uid": prompts.map(_name), "length": lengths})
    table = table.assign(**{f"reward/{name}": frame[name] for name in others}).sort_values("step", kind="stable")
    if prompt is None and question == "uid":
        table = _trajectories(table)
    notes = [f"Skipped {torn.sum():,} unreadable or empty row(s)."] if torn.any() else []
    if earlier := len(frame) - len(table):
        notes.append(
            f"{earlier:,} row(s) are earlier outputs of trajectories with several outputs. The reward of a trajectory "
            "is that of its last output, and its length is that of all outputs."
        )
    columns = {name: _numbers(table[f"reward/{name}"]) for name in others}
    rewards = {name: values for name, values in columns.items() if not np.isnan(values).all()}
    return Rollouts(
        path=path,
        table=table.reset_index(drop=True),
        rewards=rewards,
        parts=rewards,
        total=SCORE if SCORE in rewards else SUM,
        counts={"lengths": table["length"].to_numpy(float)},
        unit=unit,
        notes=tuple(notes),
    )


def _table(file: Path, exact: Collection[str]) -> pd.DataFrame:
    """Return a table; an unreadable line becomes a row without any value.

    The columns in `exact` keep the objects of the file, and the text of a CSV file. pandas would convert integers to
    floats if one of them is missing, and text that looks like a number to a number.
    """
    import pandas as pd
    import pyarrow.parquet

    with reading(file):
        if file.suffix.lower() == ".csv":
            return _csv(file, exact)
        if file.suffix.lower() == ".parquet":
            stored = pyarrow.parquet.read_table(file)
            frame = stored.to_pandas()
            columns = {name: stored[name].to_pylist() for name in frame if name in exact}
        else:
            records = [record or {} for record in json_lines(file)]
            frame = pd.DataFrame(records)
            columns = {name: [record.get(name) for record in records] for name in frame if name in exact}
        return frame.assign(**{name: pd.Series(column, frame.index, object) for name, column in columns.items()})


def _csv(file: Path, exact: Collection[str]) -> pd.DataFrame:
    """Return the table of a CSV file; an empty cell has no value. The columns in `exact` hold text."""
    import pandas as pd

    frame = pd.read_csv(file, dtype=str, keep_default_na=False).astype(object)
    for name in frame:
        frame[name] = frame[name].map(_text if name in exact else _value).astype(object)
    return frame


def _text(cell: str) -> str | None:
    return cell or None


def _value(cell: str) -> float | str | None:
    """Return a number, True or False as a number, and other cells as text.

    >>> _value("1.5"), _value("True"), _value("[[1, 2]]"), _value("")
    (1.5, 1.0, '[[1, 2]]', None)
    """
    if cell in ("True", "False"):
        return float(cell == "True")
    try:
        return float(cell)
    except ValueError:
        return _text(cell)


def _require(path: Path, missing: pd.DataFrame) -> None:
    """Raise if a row lacks something."""
    for what, rows in missing.items():
        if rows.any():
            raise DataError(
                f"{rows.sum():,} of {len(rows):,} rows of {path} have no {what}. Add the missing values, or remove "
                "these rows."
            )


def _lengths(frame: pd.DataFrame) -> tuple[Array, str]:
    """Return the length of each row, and what it counts."""
    counted = TOKENS in frame and bool(frame[TOKENS].notna().all())
    return (frame[TOKENS].to_numpy(float), TOKENS) if counted else (np.ones(len(frame)), RESPONSES)


def _name(prompt: Any) -> str:
    """Return a prompt, which may be a list or a number, as a text. Different prompts have different texts.

    >>> _name("a"), _name([1, {"b": None}]), _name(2.0)
    ('a', '[1, {"b": null}]', '2')
    """
    if isinstance(prompt, str):
        return prompt
    whole = isinstance(prompt, float) and prompt.is_integer()
    return json.dumps(int(prompt) if whole else prompt, sort_keys=True, default=str)


def _numbers(column: pd.Series[Any]) -> Array:
    """Return the numbers of a column; everything else is NaN."""
    if column.dtype.kind not in "biuf":
        column = column.astype(object).map(lambda value: value if isinstance(value, int | float) else np.nan)
    values: Array = column.to_numpy(float)
    return values


def _trajectories(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row per trajectory, with the length of all its outputs.

    The default trainer writes its key, `{prompt}_{session}_{output}`, as `uid`; other trainers write the prompt's uid.
    """
    keys = table["uid"].str.extract(r"^(?P<uid>.+)_(?P<session>\d+)_(?P<output>\d+)$")
    if keys.isna().any(axis=None) or table.duplicated(["step", "uid"]).any():
        return table
    table = table.assign(uid=keys["uid"], session=keys["session"], output=keys["output"].astype(int))
    trajectory = table.groupby(["step", "uid", "session"], sort=False)
    table["length"] = trajectory["length"].transform("sum")
    return table.loc[trajectory["output"].idxmax()]
