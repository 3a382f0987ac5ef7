"""Read dumps of verl_ext, the JSON lines that verl writes, or a table with any column names."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

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
    dumps = _dumps(path)
    if dumps and prompt is None:
        return _read_dumps(path, dumps)
    tables = _tables(path)
    if tables:
        return _read_tables(path, tables, prompt)
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
    """Return which folder to use instead of one without rollouts."""
    subfolders = [folder for folder in path.iterdir() if folder.is_dir()]
    with_rollouts = {str(folder) for folder in subfolders if _dumps(folder) or _tables(folder)}
    if with_rollouts:
        return f"Use one of its subfolders, which do: {listed(with_rollouts)}."
    return (
        "Use a folder that algorithm.verl_ext.dump_dir, trainer.rollout_data_dir or trainer.validation_data_dir names."
    )


# Dumps of verl_ext.


@dataclass(frozen=True)
class _Dump:
    """One file of a dump: the trajectories of one update."""

    folder: Path
    about: About
    table: pd.DataFrame


_Updates = dict[tuple[int, int], _Dump]
"""Dumps by step and update."""


@dataclass(frozen=True)
class _Start:
    """The dumps that one start or resume of a run wrote."""

    folder: Path
    after_step: int
    started_at: float
    updates: _Updates

    @property
    def last_written_at(self) -> float:
        return max(dump.about.written_at for dump in self.updates.values())


def _read_dumps(path: Path, files: Sequence[Path]) -> Rollouts:
    """Read the dumps of the latest start, and for earlier steps those of the start from which it resumed."""
    dumps, notes = _load_dumps(files)
    if not dumps:
        raise DataError("\n".join([f"No {DUMPS} in {path} can be read.", *notes]))
    starts = _starts_in_order(dumps)
    _check_one_run_at_a_time(starts)
    updates = _updates_of_run(starts)
    notes += _notes_on_skipped_steps(starts, updates)
    notes += _notes_on_settings(updates)
    return _rollouts_of(path, updates, notes)


def _load_dumps(files: Sequence[Path]) -> tuple[list[_Dump], list[str]]:
    """Return the readable dumps, and a note about each other file."""
    import pyarrow
    import pyarrow.parquet

    dumps = []
    notes = []
    for file in files:
        try:
            table = pyarrow.parquet.read_table(file)
        except (OSError, pyarrow.ArrowException) as error:
            notes.append(f"{file} is skipped, because it cannot be read: {str(error).splitlines()[0]}")
            continue
        metadata = table.schema.metadata or {}
        if b"verl_ext" not in metadata:
            notes.append(f"{file} is skipped, because it has no metadata `verl_ext`, which every dump of verl_ext has.")
            continue
        about = _parse_about(file, metadata[b"verl_ext"])
        dumps.append(_Dump(file.parent, about, table.to_pandas()))
    return dumps, notes


def _parse_about(file: Path, metadata: bytes) -> About:
    """Parse the metadata of a dump. Raise for those of an earlier version, which have no times."""
    with reading(file):
        entries = json.loads(metadata)
        if "started_at" not in entries:
            raise DataError(
                f"{file} has no 'started_at' in its metadata, by which compare orders the starts of a run, so an "
                "earlier version of verl_ext wrote it. Remove the file, or dump the run again with this version."
            )
        return parse_dataclass(About, entries, f"{file}: verl_ext")


def _starts_in_order(dumps: Sequence[_Dump]) -> list[_Start]:
    """Return the starts, the earliest first. All dumps of a start have the same folder and the same start time."""
    starts: dict[tuple[Path, float], _Start] = {}
    for dump in dumps:
        about = dump.about
        key = (dump.folder, about.started_at)
        if key not in starts:
            starts[key] = _Start(dump.folder, about.after_step, about.started_at, updates={})
        starts[key].updates[about.step, about.update] = dump
    return sorted(starts.values(), key=lambda start: start.started_at)


def _check_one_run_at_a_time(starts: Sequence[_Start]) -> None:
    """Raise if a start wrote a dump after the next start had begun."""
    for start, next_start in pairwise(starts):
        if start.last_written_at > next_start.started_at:
            raise DataError(
                f"By the times in their metadata, {start.folder} and {next_start.folder} were written by two runs at "
                "the same time. Use one of the two folders, and set another algorithm.verl_ext.dump_dir for each run."
            )


def _updates_of_run(starts: Sequence[_Start]) -> _Updates:
    """Return the updates of the run in order. Each start replaces all steps after the one from which it resumes.

    For example, the first start wrote the steps 1 to 4, and the second resumed from step 2 and wrote step 3. Then the
    history is 1 and 2 of the first start, and 3 of the second. If a third start resumes from step 4, it resumes the
    first start, because the second did not reach step 4. Then the history is 1 to 4 of the first start, and 5 onwards
    of the third.
    """
    histories: list[_Updates] = [{}]
    for start in starts:
        resumed = _resumed_history(histories, start.after_step)
        history = {(step, update): dump for (step, update), dump in resumed.items() if step <= start.after_step}
        history.update(start.updates)
        histories.append(history)
    return dict(sorted(histories[-1].items()))


def _resumed_history(histories: Sequence[_Updates], after_step: int) -> _Updates:
    """Return the latest history that reached a step, because a start that ended earlier has no checkpoint of this step.

    If no history reached the step, for example because a full disk ended the dumps, return the latest history.
    """
    for history in reversed(histories):
        last_step = max((step for step, _ in history), default=0)
        if last_step >= after_step:
            return history
    return histories[-1]


def _notes_on_skipped_steps(starts: Sequence[_Start], updates: _Updates) -> list[str]:
    """Return a note for each start with dumps that are not among the updates of the run."""
    notes = []
    for start in starts:
        skipped = [step for (step, update), dump in start.updates.items() if updates.get((step, update)) is not dump]
        if not skipped:
            continue
        first, last = min(skipped), max(skipped)
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        notes.append(f"Skipped {steps} of {start.folder}. The latest start of the run did not resume from there.")
    return notes


def _notes_on_settings(updates: _Updates) -> list[str]:
    """Return a note if the settings of the run changed."""
    settings = [(dump.about.estimator, dump.about.algorithm, dump.about.loss_agg_mode) for dump in updates.values()]
    others = len(settings) - settings.count(settings[-1])
    if not others:
        return []
    return [
        f"{others} of {len(updates)} updates had other settings than the last update, whose settings are used here."
    ]


def _rollouts_of(path: Path, updates: _Updates, notes: Sequence[str]) -> Rollouts:
    """Return the trajectories of a run with the settings of its last update."""
    import pandas as pd

    dumps = list(updates.values())
    last = dumps[-1].about
    frame = pd.concat([dump.table for dump in dumps], ignore_index=True)
    is_missing = frame.reindex(columns=["step", "update", "uid"]).isna()
    for column in is_missing:
        _require(path, repr(column), is_missing[column])
    weights = _weights_of_run(last)
    rewards = {}
    parts = {}
    for key in _numeric_rewards(frame):
        received = frame[f"reward/{key}"].astype(float)
        # Without conditions and per-turn rewards, the estimator read the rewards as they were scored, and a dump has no
        # column `raw/<key>`.
        scored = frame.get(f"raw/{key}", received).fillna(received)
        rewards[key] = scored.to_numpy(float)
        parts[key] = received.to_numpy(float) * weights.get(key, 1.0)
    total = _name_of_total(rewards)
    rewards[total] = frame["total"].to_numpy(float)
    parts[total] = rewards[total]
    lengths, unit = _lengths(frame)
    counts = {"lengths": lengths}
    if "outputs" in frame:
        counts["outputs"] = frame["outputs"].to_numpy(float)
    return Rollouts(
        path=path,
        table=frame,
        rewards=rewards,
        parts=parts,
        weights=weights,
        total=total,
        counts=counts,
        unit=unit,
        run=last,
        notes=tuple(notes),
    )


def _numeric_rewards(frame: pd.DataFrame) -> list[str]:
    """Return the keys of the rewards that are numbers. A rubric is text."""
    columns = frame.filter(regex="^reward/").select_dtypes(["number", "bool"])
    return [column.removeprefix("reward/") for column in columns]


def _weights_of_run(about: About) -> dict[str, float]:
    """Return the weights in the total of a run. verl's own estimators do not use `algorithm.rewards.weights`."""
    rewards = Settings.parse(about.algorithm).rewards
    if about.estimator not in INSTALLED or rewards.weights is None:
        return {}
    return dict(zip(rewards.keys or (), rewards.weights, strict=True))


def _name_of_total(keys: Collection[str]) -> str:
    """Return a name for the total that no reward has."""
    return next(name for name in ("total", SCORE, "sum") if name not in keys)


# Tables with one row per response.


def _read_tables(path: Path, files: Sequence[Path], prompt: str | None) -> Rollouts:
    """Read tables with one row per response. If a trajectory has several outputs, the last one has the reward."""
    import pandas as pd

    exact = {"uid", "input", "gts"} if prompt is None else {"uid", "input", "gts", prompt}
    rows = pd.concat(_table(file, exact) for file in files)
    is_empty = rows.isna().all(axis=1)
    frame = rows[~is_empty].reset_index(drop=True)
    _check_columns(path, frame, prompt)
    prompt_columns = _prompt_columns_of_verl(path, frame) if prompt is None else [prompt]
    responses, unit = _responses(path, frame, prompt_columns)
    trajectories = responses
    if prompt is None and prompt_columns == ["uid"]:
        trajectories = _trajectories(responses)
    lengths = trajectories["length"].to_numpy(float)
    rewards = _rewards(trajectories)
    notes = _notes_on_rows(empty=int(is_empty.sum()), earlier_outputs=len(responses) - len(trajectories))
    return Rollouts(
        path=path,
        table=trajectories.reset_index(drop=True),
        rewards=rewards,
        parts=rewards,
        total=SCORE if SCORE in rewards else SUM,
        counts={"lengths": lengths},
        unit=unit,
        notes=notes,
    )


def _table(file: Path, exact: Collection[str]) -> pd.DataFrame:
    """Return a table; an unreadable line becomes a row without any value.

    The columns in `exact` keep the objects of the file, and the text of a CSV file. pandas would convert integers to
    floats if one of them is missing, and text that looks like a number to a number.
    """
    with reading(file):
        match file.suffix.lower():
            case ".csv":
                return _csv(file, exact)
            case ".parquet":
                return _parquet(file, exact)
            case _:
                return _json_lines(file, exact)


def _csv(file: Path, exact: Collection[str]) -> pd.DataFrame:
    """Return the table of a CSV file; an empty cell has no value. The columns in `exact` hold text."""
    import pandas as pd

    frame = pd.read_csv(file, dtype=str, keep_default_na=False).astype(object)
    for name in frame:
        parse_cell = _text if name in exact else _value
        frame[name] = frame[name].map(parse_cell).astype(object)
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


def _parquet(file: Path, exact: Collection[str]) -> pd.DataFrame:
    import pandas as pd
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(file)
    frame = table.to_pandas()
    for name in frame:
        if name in exact:
            frame[name] = pd.Series(table[name].to_pylist(), frame.index, object)
    return frame


def _json_lines(file: Path, exact: Collection[str]) -> pd.DataFrame:
    import pandas as pd

    records = [record or {} for record in json_lines(file)]
    frame = pd.DataFrame(records)
    for name in frame:
        if name in exact:
            frame[name] = pd.Series([record.get(name) for record in records], frame.index, object)
    return frame


def _check_columns(path: Path, frame: pd.DataFrame, prompt: str | None) -> None:
    """Raise if there are no responses, or no column `prompt`."""
    if frame.empty:
        raise DataError(f"{path} contains no readable rows. Use a table with one row per response.")
    if set(frame) == {"step", "data"}:
        raise DataError(
            f"{path} is a log of metrics and contains no responses. Use `python -m verl_ext report {path}`."
        )
    if prompt is not None and prompt not in frame:
        raise DataError(f"--prompt: {unknown('column', prompt, frame)}.")


def _prompt_columns_of_verl(path: Path, frame: pd.DataFrame) -> list[str]:
    """Return the columns by which verl identifies a prompt.

    The same text may come with different images. So the text counts together with the ground truth.
    """
    if "uid" in frame:
        return ["uid"]
    if "input" in frame:
        return ["input", "gts"] if "gts" in frame else ["input"]
    raise DataError(
        f"{path} has no column 'uid' or 'input', so it is not known which responses belong to the same prompt. Set "
        f"--prompt to the column that identifies the prompt. The columns are {listed(frame)}."
    )


def _responses(path: Path, frame: pd.DataFrame, prompt_columns: list[str]) -> tuple[pd.DataFrame, str]:
    """Return the columns of `Rollouts.table` and the length of each row, in the order of the steps, and its unit."""
    import pandas as pd

    uids = _uids(path, frame, prompt_columns)
    steps = _steps(path, frame)
    lengths, unit = _lengths(frame)
    table = pd.DataFrame({"step": steps, "update": 0, "uid": uids, "length": lengths})
    keys = sorted(set(frame) - {*prompt_columns, "uid", "input", "output", "gts", "step", TOKENS})
    table = table.join(frame[keys].add_prefix("reward/"))
    return table.sort_values("step", kind="stable"), unit


def _uids(path: Path, frame: pd.DataFrame, prompt_columns: list[str]) -> pd.Series[Any]:
    """Return a text for each row that identifies its prompt. Only the first of the columns must have a value."""
    import pandas as pd

    prompts = frame[prompt_columns[0]]
    _require(path, repr(prompt_columns[0]), prompts.isna())
    if len(prompt_columns) > 1:
        prompts = pd.Series(frame[prompt_columns].itertuples(index=False, name=None))
    return prompts.map(_prompt_text)


def _prompt_text(prompt: Any) -> str:
    """Return a prompt, which may be a list or a number, as a text. Different prompts have different texts.

    >>> _prompt_text("a"), _prompt_text([1, {"b": None}]), _prompt_text(2.0)
    ('a', '[1, {"b": null}]', '2')
    """
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, float) and prompt.is_integer():
        prompt = int(prompt)
    return json.dumps(prompt, sort_keys=True, default=str)


def _steps(path: Path, frame: pd.DataFrame) -> npt.NDArray[np.int_]:
    """Return the step of each row, 0 without a column `step`. Raise for a value that is not a whole number."""
    if "step" not in frame:
        return np.zeros(len(frame), dtype=int)
    numbers = _numbers(frame["step"])
    with np.errstate(invalid="ignore"):
        steps = numbers.astype(int)
    # A missing value, an infinite number and a fraction differ from their integer.
    _require(path, "whole number in 'step'", steps != numbers)
    return steps


def _trajectories(responses: pd.DataFrame) -> pd.DataFrame:
    """Return one row per trajectory: its last output, with the length of all its outputs.

    The default trainer writes its key, `{prompt}_{session}_{output}`, as `uid`. Other trainers write the prompt's uid.
    """
    keys = responses["uid"].str.extract(r"^(?P<uid>.+)_(?P<session>\d+)_(?P<output>\d+)$")
    has_other_uids = keys.isna().any(axis=None)
    has_duplicates = responses.duplicated(["step", "uid"]).any()
    if has_other_uids or has_duplicates:
        return responses
    outputs = responses.assign(uid=keys["uid"], session=keys["session"], output=keys["output"].astype(int))
    trajectories = outputs.groupby(["step", "uid", "session"], sort=False)
    outputs["length"] = trajectories["length"].transform("sum")
    last_output = trajectories["output"].idxmax()
    return outputs.loc[last_output]


def _rewards(trajectories: pd.DataFrame) -> dict[str, Array]:
    """Return the rewards that have a number, by key."""
    rewards = {}
    for column in trajectories.filter(regex="^reward/"):
        values = _numbers(trajectories[column])
        if not np.isnan(values).all():
            rewards[column.removeprefix("reward/")] = values
    return rewards


def _notes_on_rows(empty: int, earlier_outputs: int) -> tuple[str, ...]:
    """Return notes about the rows of tables that are not among the trajectories."""
    notes = []
    if empty:
        notes.append(f"Skipped {empty:,} unreadable or empty row(s).")
    if earlier_outputs:
        notes.append(
            f"{earlier_outputs:,} row(s) are earlier outputs of trajectories with several outputs. The reward of a "
            "trajectory is that of its last output, and its length is that of all outputs."
        )
    return tuple(notes)


# Columns of dumps and of tables.


def _require(path: Path, what: str, is_missing: pd.Series[bool]) -> None:
    """Raise if a row lacks a value. `what` names the value."""
    if is_missing.any():
        raise DataError(
            f"{is_missing.sum():,} of {len(is_missing):,} rows of {path} have no {what}. Add the missing values, or "
            "remove these rows."
        )


def _lengths(frame: pd.DataFrame) -> tuple[Array, str]:
    """Return the length of each row, and what it counts."""
    if TOKENS in frame and frame[TOKENS].notna().all():
        return frame[TOKENS].to_numpy(float), TOKENS
    return np.ones(len(frame)), RESPONSES


def _numbers(column: pd.Series[Any]) -> Array:
    """Return the numbers of a column; everything else is NaN."""
    if column.dtype.kind not in "biuf":
        column = column.astype(object).map(_number)
    values: Array = column.to_numpy(float)
    return values


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else math.nan
