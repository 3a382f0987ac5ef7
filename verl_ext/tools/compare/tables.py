"""Read tables with one row per response: the JSON lines that verl writes, or a table with any column names."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from verl_ext.core.groups import Array
from verl_ext.errors import DataError, explaining_errors, listed, unknown
from verl_ext.files import json_lines
from verl_ext.tools.compare.rollouts import SCORE, TOKENS, WEIGHTED_SUM, Rollouts, lengths_of, require_values

if TYPE_CHECKING:
    import pandas as pd


def read_tables(path: Path, files: Sequence[Path], prompt: str | None) -> Rollouts:
    """Read tables with one row per response. If a trajectory has several outputs, the last one has the reward."""
    import pandas as pd

    exact_columns = {"uid", "input", "gts"}
    if prompt is not None:
        exact_columns.add(prompt)
    rows = pd.concat(_table(file, exact_columns) for file in files)
    is_empty = rows.isna().all(axis=1)
    frame = rows[~is_empty].reset_index(drop=True)
    _check_columns(path, frame, prompt)
    prompt_columns = _prompt_columns_of_verl(path, frame) if prompt is None else [prompt]
    responses, length_unit = _responses(path, frame, prompt_columns)
    trajectories = responses
    if prompt is None and prompt_columns == ["uid"]:
        trajectories = _trajectories(responses)
    rewards = _rewards(trajectories)
    notes = _notes_on_rows(empty=int(is_empty.sum()), earlier_outputs=len(responses) - len(trajectories))
    return Rollouts(
        path=path,
        table=trajectories.reset_index(drop=True),
        rewards=rewards,
        contributions=rewards,
        total_key=SCORE if SCORE in rewards else WEIGHTED_SUM,
        counts={"lengths": trajectories["length"].to_numpy(float)},
        length_unit=length_unit,
        notes=notes,
    )


def _table(file: Path, exact_columns: Collection[str]) -> pd.DataFrame:
    """Return a table; an unreadable line becomes a row without any value.

    The columns in `exact_columns` keep the objects of the file, and the text of a CSV file. pandas would convert
    integers to floats if one of them is missing, and text that looks like a number to a number.
    """
    with explaining_errors(file):
        match file.suffix.lower():
            case ".csv":
                return _csv(file, exact_columns)
            case ".parquet":
                return _parquet(file, exact_columns)
            case _:
                return _json_lines(file, exact_columns)


def _csv(file: Path, exact_columns: Collection[str]) -> pd.DataFrame:
    """Return the table of a CSV file; an empty cell has no value. The columns in `exact_columns` hold text."""
    import pandas as pd

    frame = pd.read_csv(file, dtype=str, keep_default_na=False).astype(object)
    for name in frame:
        parse_cell = _text if name in exact_columns else _value
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


def _parquet(file: Path, exact_columns: Collection[str]) -> pd.DataFrame:
    import pandas as pd
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(file)
    frame = table.to_pandas()
    for name in frame:
        if name in exact_columns:
            frame[name] = pd.Series(table[name].to_pylist(), frame.index, object)
    return frame


def _json_lines(file: Path, exact_columns: Collection[str]) -> pd.DataFrame:
    import pandas as pd

    records = [record or {} for record in json_lines(file)]
    frame = pd.DataFrame(records)
    for name in frame:
        if name in exact_columns:
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
    lengths, length_unit = lengths_of(frame)
    table = pd.DataFrame({"step": steps, "update": 0, "uid": uids, "length": lengths})
    reward_columns = sorted(set(frame) - {*prompt_columns, "uid", "input", "output", "gts", "step", TOKENS})
    table = table.join(frame[reward_columns].add_prefix("reward/"))
    return table.sort_values("step", kind="stable"), length_unit


def _uids(path: Path, frame: pd.DataFrame, prompt_columns: list[str]) -> pd.Series[Any]:
    """Return a text for each row that identifies its prompt. Only the first of the columns must have a value."""
    import pandas as pd

    prompts = frame[prompt_columns[0]]
    require_values(path, repr(prompt_columns[0]), prompts.isna())
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
    require_values(path, "whole number in 'step'", steps != numbers)
    return steps


def _trajectories(responses: pd.DataFrame) -> pd.DataFrame:
    """Return one row per trajectory: its last output, with the length of all its outputs.

    The default trainer writes its key, `{prompt}_{session}_{output}`, as `uid`. Other trainers write the prompt's uid.
    """
    parts_of_uid = responses["uid"].str.extract(r"^(?P<uid>.+)_(?P<session>\d+)_(?P<output>\d+)$")
    has_other_uids = parts_of_uid.isna().any(axis=None)
    has_duplicates = responses.duplicated(["step", "uid"]).any()
    if has_other_uids or has_duplicates:
        return responses
    outputs = responses.assign(**parts_of_uid).astype({"output": int})
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


def _numbers(column: pd.Series[Any]) -> Array:
    """Return the numbers of a column; everything else is NaN."""
    if column.dtype.kind not in "biuf":
        column = column.astype(object).map(_number)
    values: Array = column.to_numpy(float)
    return values


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else math.nan
