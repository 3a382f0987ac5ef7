"""Choose rows of a run's data on which its reward function is tried, and find what rows are missing."""

import json
import reprlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_ext.errors import DataError, Finding, listed, reading
from verl_ext.run_config import select

VISITED = 1000
"""The number of rows of a file whose prompt lengths are counted."""
SEED = 1
"""The seed of the rows that are drawn from a file with several data sources."""


def read_responses(file: Path) -> list[list[str]]:
    """Read a JSONL file with one response per row: a string, or a list with the string of each turn."""
    with reading(file):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").rstrip("\n").split("\n")]
        responses = [[line] if isinstance(line, str) else line for line in lines]
        for number, turns in enumerate(responses, start=1):
            if not (isinstance(turns, list) and {*map(type, turns)} == {str}):
                raise DataError(
                    f"Line {number} of {file} is {reprlib.repr(turns)}. Write a JSON string, or a list of JSON strings "
                    "for a multi-turn session."
                )
    return responses


def files_of(config: Any, setting: str) -> list[str]:
    """The files that a setting names, one or several."""
    files = select(config, setting)
    return [files] if isinstance(files, str) else list(files or [])


def rows_of(
    config: Any, setting: str, most: int, *, spread: bool = True, visit: Callable[[Any], None] | None = None
) -> tuple[dict[str, Any], list[Finding]]:
    """Return rows of a setting's files by their places, and findings about the first invalid row of each kind.

    With `spread` the rows are a stratified sample of every file (see `stratified`), and at least one row of each
    `data_source` is included. Otherwise they are the first rows. `visit` is called with the prompts of a stratified
    sample of `VISITED` rows of each file.
    """
    prompt, paths = select(config, "data.prompt_key"), files_of(config, setting)
    own = select(config, "data.custom_cls.path") is not None
    hint = ""
    if own:
        hint = (
            " data.custom_cls reads this file in its own way. Use `rehearse --rows 0`, or `check` without --try-reward."
        )
    rows: dict[str, Any] = {}
    findings: list[Finding] = []
    for path in paths if spread else paths[:1]:
        if setting == "data.val_files" and not Path(path).exists():
            continue  # the plan of the run has a note about it
        first: dict[tuple[Any, str], tuple[int, Any]] = {}
        with reading(f"{setting}={path}", fix=hint.strip()):
            _, parts = batches(path, ["data_source", "reward_model", "extra_info", "agent_name", prompt])
            sources = _sources(path) if spread else []
            wanted = stratified(sources, -(-most // len(paths))) if spread else {*range(most)}
            visited = stratified(sources or _sources(path), VISITED) if visit is not None else ()
            others: dict[int, Any] = {}
            for at, row in enumerate(row for part in parts for row in part.to_pylist()):
                model = row.get("reward_model", {})
                if model is not None and "ground_truth" not in model:
                    raise DataError(
                        f"Row {at} of {path} has no reward_model.ground_truth, which verl needs. It has the columns "
                        f"{listed(row)}. Add the column reward_model with the entries style and ground_truth.{hint}"
                    )
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
            text = (
                f"Row {at} of {path}: the column data.prompt_key={prompt} is {reprlib.repr(found)}, not chat messages."
            )
            fix = f"Write a list of messages, each with the entries role and content.{hint}"
            findings.append(Finding("error", text, fix))
        for (source, lack), (at, _) in first.items():
            if lack and (source, "") in first:  # if no row of a source has a ground truth, its function needs none
                text = f"Row {at} of {path}: reward_model.ground_truth is {lack}, unlike other rows of its data_source."
                fix = "Remove the row, or add its ground truth."
                findings.append(Finding("error" if lack == "null" else "note", text, fix))
    return rows, findings


def stratified(sources: Sequence[Any], count: int) -> set[int]:
    """Return the places of `count` rows, in proportion to the rows of each data source.

    The rows of a single data source are evenly spaced. If there are several, the rows of each are drawn by a seed: the
    sources may alternate, and evenly spaced rows would then all have the same one.

    >>> sorted({place % 3 for place in stratified(["a", "b", "c"] * 10, 10)})
    [0, 1, 2]
    """
    total = len(sources)
    if len({*map(str, sources)}) < 2:
        return {at * total // count for at in range(count)}
    places = np.random.default_rng(SEED).permutation(total).tolist()
    places.sort(key=lambda place: str(sources[place]))  # keeps the random order within a source
    return {places[(2 * at + 1) * total // (2 * count)] for at in range(count)}


def _sources(path: str) -> list[Any]:
    """Return the data source of every row of a file."""
    total, parts = batches(path, ["data_source"])
    sources: list[Any] = []
    for part in parts:
        if "data_source" in part.schema.names:
            sources += part.column("data_source").to_pylist()
    return sources or [None] * total  # the file may lack the column


def batches(path: str, columns: list[str]) -> tuple[int, Any]:
    """Return the number of rows of a file, and its rows in batches."""
    if not path.endswith((".parquet", ".json", ".jsonl")):
        raise DataError(f"verl cannot read {path}. Use a file whose name ends with .parquet, .json or .jsonl.")
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
