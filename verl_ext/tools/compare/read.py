"""Read our dumps of advantages, the JSON lines that verl writes, or a table with any column names."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_ext.core.groups import Array
from verl_ext.core.typed import make
from verl_ext.errors import DataError, listed, reading, unknown
from verl_ext.files import METRICS, json_lines
from verl_ext.registry import INSTALLED
from verl_ext.settings import Settings
from verl_ext.tools.compare.rollouts import ANSWERS, SCORE, SUM, TOKENS, About, Rollouts

if TYPE_CHECKING:
    import pandas as pd

DUMPS = "advantages-*.parquet"
TABLES = (".parquet", ".jsonl")


def read_rollouts(path: Path, prompt: str | None = None) -> Rollouts:
    """Read a file, or those of a folder: our dumps if it has some, else tables.

    `prompt` names the column of the prompt in a table; by default it is named as verl names it.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if prompt is None and (dumps := _dumps(path)):
        return _read_dumps(path, dumps)
    files = [path] if path.is_file() else _tables(path)
    if files:
        return _read_tables(path, files, prompt)
    below = {str(folder) for folder in path.glob("*") if folder.is_dir() and (_dumps(folder) or _tables(folder))}
    raise DataError(f"{path} holds neither {DUMPS} nor *{' nor *'.join(TABLES)}; its subfolders do: {listed(below)}")


def _dumps(path: Path) -> list[Path]:
    """Return the dumps in a folder and in its folders `from-<step>-<n>`, or the file itself if it is a dump."""
    if path.is_dir():
        starts = path.glob(f"from-*/{DUMPS}")
        return [*path.glob(DUMPS), *(file for file in starts if re.fullmatch(r"from-\d+-\d+", file.parent.name))]
    return [path] if path.match(DUMPS) else []


def _tables(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.iterdir()) if file.suffix in TABLES and file.name != METRICS]


def _read_dumps(path: Path, files: Sequence[Path]) -> Rollouts:
    """Read dumps: those of the last start and, up to the step where it begins, of the start that it goes on from."""
    import pandas as pd
    import pyarrow
    import pyarrow.parquet

    starts: dict[Path, dict[tuple[int, int], tuple[pd.DataFrame, About]]] = {}
    notes = []
    for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, file)):
        try:
            table = pyarrow.parquet.read_table(file)
            metadata = (table.schema.metadata or {})[b"verl_ext"]
        except (OSError, KeyError, pyarrow.ArrowException) as error:
            notes.append(f"{file} is left out: {str(error).splitlines()[0]}")
            continue
        with reading(file):
            about = make(About, json.loads(metadata), f"{file}: verl_ext")
        if file.parent in starts and (other := [*starts][-1]) != file.parent:
            raise DataError(
                f"by the times of their files {file.parent} and {other} are two runs at once: name one of them here, "
                "and give each run its own algorithm.verl_ext.dump_dir"
            )
        starts.setdefault(file.parent, {})[about.step, about.update] = table.to_pandas(), about
    if not starts:
        raise DataError("\n".join([f"no {DUMPS} can be read in {path}", *notes]))
    runs: list[dict[tuple[int, int], tuple[pd.DataFrame, About]]] = [{}]
    for folder, own in starts.items():
        begin = int(folder.name.split("-")[1]) if folder.parent == path else 0
        reached = [run for run in runs if max(run, default=(0, 0))[0] >= begin]
        runs.append({key: update for key, update in (reached or runs)[-1].items() if key[0] <= begin} | own)
    updates = dict(sorted(runs[-1].items()))
    for folder, own in starts.items():
        if gone := sorted(key[0] for key, update in own.items() if updates.get(key) is not update):
            notes.append(
                f"{folder}: steps {gone[0]} to {gone[-1]} are left out: by the times of the files no later start goes "
                "on from them"
            )
    frame = pd.concat([table for table, _ in updates.values()], ignore_index=True)
    _require(path, frame.reindex(columns=["step", "update", "uid"]).isna().rename(columns=repr))
    last = updates[max(updates)][1]
    abouts = [replace(about, step=last.step, update=last.update) for _, about in updates.values()]
    if others := len(abouts) - abouts.count(last):
        notes.append(f"{others} of {len(updates)} updates had other settings than the last")
    numeric = [name for name in frame if name.startswith("reward/") and frame[name].dtype.kind in "biuf"]
    keys = [name.partition("/")[2] for name in numeric]
    seen = {key: frame[f"reward/{key}"].astype(float) for key in keys}
    # A file of a run without conditions has only what the estimator saw: it saw the rewards as they were scored.
    raw = {key: frame.get(f"raw/{key}", values).fillna(values).to_numpy(float) for key, values in seen.items()}
    total = next(name for name in ("total", SCORE, "sum") if name not in seen)
    ours = Settings.parse(last.algorithm).rewards
    weights = dict(zip(ours.keys or (), ours.weights or (), strict=False)) if last.estimator in INSTALLED else {}
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
    """Read tables with a row an answer. Of a trajectory in several parts the last one has the reward, as in verl."""
    import pandas as pd

    frame = pd.concat(_table(file, {prompt, "uid", "input", "gts"}) for file in files)
    torn = frame.isna().all(axis=1)
    frame = frame[~torn].reset_index(drop=True)
    if prompt is not None and prompt not in frame:
        raise DataError(f"--prompt: {unknown('column', prompt, frame)}")
    question = prompt or next((name for name in ("uid", "input") if name in frame), None)
    if question is None:
        raise DataError(f"{path}: name the column of the prompt with --prompt, one of {listed(frame)}")
    steps = _numbers(frame["step"]) if "step" in frame else np.zeros(len(frame))
    with np.errstate(invalid="ignore"):
        whole = steps.astype(int)
    missing = {repr(question): frame[question].isna(), "whole number in 'step'": whole != steps}
    _require(path, pd.DataFrame(missing))
    prompts = frame[question]
    if prompt is None and question == "input" and "gts" in frame:  # the same text may come with different pictures
        prompts = pd.Series(zip(prompts, frame["gts"], strict=True))
    lengths, unit = _lengths(frame)
    others = sorted(set(frame) - {question, "uid", "input", "output", "gts", "step", TOKENS})
    table = pd.DataFrame({"step": whole, "update": 0, "uid": prompts.map(_name), "length": lengths})
    table = table.assign(**{f"reward/{name}": frame[name] for name in others}).sort_values("step", kind="stable")
    if prompt is None and question == "uid":
        table = _trajectories(table)
    notes = [f"{torn.sum():,} unreadable line(s) left out"] if torn.any() else []
    if earlier := len(frame) - len(table):
        notes.append(f"{earlier:,} lines are earlier parts of a trajectory: the last part has its reward")
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


def _table(file: Path, exact: Collection[str | None]) -> pd.DataFrame:
    """Return a table; an unreadable line becomes a row without any value.

    The columns in `exact` hold Python's own objects: pandas would round integers beside a missing one.
    """
    import pandas as pd
    import pyarrow.parquet

    with reading(file):
        if file.suffix == ".parquet":
            stored = pyarrow.parquet.read_table(file)
            frame = stored.to_pandas()
            columns = {name: stored[name].to_pylist() for name in frame if name in exact}
        else:
            records = [record or {} for record in json_lines(file)]
            frame = pd.DataFrame(records)
            columns = {name: [record.get(name) for record in records] for name in frame if name in exact}
        return frame.assign(**{name: pd.Series(column, frame.index, object) for name, column in columns.items()})


def _require(path: Path, missing: pd.DataFrame) -> None:
    """Raise if a row lacks something."""
    for what, rows in missing.items():
        if rows.any():
            raise DataError(f"{path}: {rows.sum():,} of {len(rows):,} rows have no {what}")


def _lengths(frame: pd.DataFrame) -> tuple[Array, str]:
    """Return the length of each row, and what it counts."""
    counted = TOKENS in frame and bool(frame[TOKENS].notna().all())
    return (frame[TOKENS].to_numpy(float), TOKENS) if counted else (np.ones(len(frame)), ANSWERS)


def _name(prompt: Any) -> str:
    """Return a prompt, which may be a list or a number, as a text: others have another.

    >>> _name("a"), _name([1, {"b": None}]), _name(2.0)
    ('a', '[1, {"b": null}]', '2')
    """
    if isinstance(prompt, str):
        return prompt
    whole = isinstance(prompt, float) and prompt.is_integer()
    return json.dumps(int(prompt) if whole else prompt, sort_keys=True, default=str)


def _numbers(column: pd.Series[Any]) -> Array:
    """Return the numbers of a column, NaN in the place of everything else."""
    if column.dtype.kind not in "biuf":
        column = column.astype(object).map(lambda value: value if isinstance(value, int | float) else np.nan)
    values: Array = column.to_numpy(float)
    return values


def _trajectories(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row a trajectory, with the length of all its parts.

    The default trainer writes its key, `{prompt}_{session}_{part}`, as `uid`; other trainers write the prompt's uid.
    """
    keys = table["uid"].str.extract(r"^(?P<uid>.+)_(?P<session>\d+)_(?P<part>\d+)$")
    if keys.isna().any(axis=None) or table.duplicated(["step", "uid"]).any():
        return table
    table = table.assign(uid=keys["uid"], session=keys["session"], part=keys["part"].astype(int))
    trajectory = table.groupby(["step", "uid", "session"], sort=False)
    table["length"] = trajectory["length"].transform("sum")
    return table.loc[trajectory["part"].idxmax()]
