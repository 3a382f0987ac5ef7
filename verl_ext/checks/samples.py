"""Rows of a run's data to try its reward function on, and what all of its rows lack."""

import json
import reprlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_ext.errors import DataError, Finding, listed, reading
from verl_ext.files import say
from verl_ext.run_config import select

VISITED = 1000
"""Rows of a file whose prompts are counted."""


def read_answers(file: Path) -> list[list[str]]:
    """Read a file of JSON lines: an answer, or the list of its turns."""
    with reading(file):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").rstrip("\n").split("\n")]
        answers = [[line] if isinstance(line, str) else line for line in lines]
        if others := [turns for turns in answers if not (isinstance(turns, list) and {*map(type, turns)} == {str})]:
            raise DataError(f"{file}: a line is an answer in JSON, or the list of its turns, not {others[0]!r}")
    return answers


def files_of(config: Any, setting: str) -> list[str]:
    """The files that a setting names, one or several."""
    files = select(config, setting)
    return [files] if isinstance(files, str) else list(files or [])


def rows_of(
    config: Any, setting: str, most: int, *, spread: bool = True, visit: Callable[[Any], None] | None = None
) -> tuple[dict[str, Any], list[Finding]]:
    """Return rows of a setting's files by their places, and the first place of each kind of lack in a file.

    The rows are spread over the files, with one at least of each `data_source`; else they are the first. `visit` is
    called with `VISITED` rows that are spread over each file.
    """
    prompt, paths = select(config, "data.prompt_key"), files_of(config, setting)
    own = select(config, "data.custom_cls.path") is not None
    advice = " (data.custom_cls reads it: rehearse with --rows 0, or check without --try-reward)" if own else ""
    rows: dict[str, Any] = {}
    lacks: list[Finding] = []
    for path in paths if spread else paths[:1]:
        if setting == "data.val_files" and not Path(path).exists():
            say(f"{setting}={path} is missing: its rows are not tried")
            continue
        first: dict[tuple[Any, str], tuple[int, Any]] = {}
        with reading(f"{setting}={path}{advice}"):
            total, parts = batches(path, ["data_source", "reward_model", "extra_info", "agent_name", prompt])
            share = -(-most // len(paths))
            wanted = {at * total // share for at in range(share)} if spread else {*range(most)}
            visited = {at * total // VISITED for at in range(VISITED)} if visit is not None else ()
            others: dict[int, Any] = {}
            for at, row in enumerate(row for part in parts for row in part.to_pylist()):
                model = row.get("reward_model", {})
                if model is not None and "ground_truth" not in model:
                    names = f"{listed(row)}{advice}"
                    raise DataError(f"{path} has no reward_model.ground_truth, which verl needs: {names}")
                truth = (model or {}).get("ground_truth")
                lack = "null" if truth is None else "empty" if truth in ("", [], {}) else ""
                first.setdefault((row.get("data_source"), lack), (at, row))
                if at in wanted:
                    rows[f"row {at} of {path}"] = row
                if not _are_messages(row.get(prompt)):
                    others = others or {at: row.get(prompt)}
                elif visit is not None and at in visited:
                    visit(row[prompt])
        known = {row.get("data_source") for row in rows.values()}
        more = {f"row {at} of {path}": row for (source, _), (at, row) in first.items() if source not in known}
        rows |= more if spread else {}
        for at, found in others.items():
            text = f"{prompt} is {reprlib.repr(found)}, expected messages, each with role and content"
            lacks.append(Finding(f"row {at} of {path}: data.prompt_key={text}{advice}"))
        for (source, lack), (at, _) in first.items():
            if lack and (source, "") in first:  # where no row of a source has a truth, its function needs none
                lacks.append(Finding(f"row {at} of {path}: reward_model.ground_truth is {lack}", lack == "null"))
    return rows, lacks


def batches(path: str, columns: list[str]) -> tuple[int, Any]:
    """The number of rows of a file, and its rows in batches."""
    if not path.endswith((".parquet", ".json", ".jsonl")):
        raise DataError(f"{path} is not read by verl: name a file that ends with .parquet, .json or .jsonl")
    import pyarrow.json
    import pyarrow.parquet

    if path.endswith(".parquet"):
        file = pyarrow.parquet.ParquetFile(path)
        return file.metadata.num_rows, file.iter_batches(4096, columns=columns)
    table = pyarrow.json.read_json(path)
    return len(table), table.to_batches()


def _are_messages(found: Any) -> bool:
    """Whether each has a role and a content; an assistant's content may be a call of a tool."""
    return isinstance(found, list) and all(
        isinstance(message, dict)
        and message.get("role") is not None
        and (message.get("content") is not None or message["role"] == "assistant")
        for message in found
    )
