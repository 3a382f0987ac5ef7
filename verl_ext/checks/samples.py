"""Choose rows of a run's data on which its reward function is tried, and find what the data lack."""

import json
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl_ext.errors import DataError, Finding, explaining_errors, listed
from verl_ext.run_config import select

COUNTED_PROMPTS = 1000
"""The number of rows of a file whose prompt lengths are counted."""
SEED = 1
"""The seed of the rows that are drawn from a file with several data sources."""
OWN_DATASET = (
    "data.custom_cls reads this file in its own way. Use `rehearse --rows 0`, or `check` without --try-reward."
)
COLUMNS = ("data_source", "reward_model", "extra_info", "agent_name")
"""The columns that verl passes on to the reward function or to the agent loop."""
Row = dict[str, Any]


class Sample(NamedTuple):
    """Rows of the files of a setting."""

    rows: dict[str, Row]
    """The chosen rows by their places, such as `row 3 of train.parquet`."""
    prompts: list[Any]
    """The prompts of a sample of rows, as messages."""
    findings: list[Finding]


def read_responses(file: Path) -> list[list[str]]:
    """Read a JSONL file with one response per row: a string, or a list with the string of each turn."""
    with explaining_errors(file):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").rstrip("\n").split("\n")]
        responses = [[line] if isinstance(line, str) else line for line in lines]
        for number, turns in enumerate(responses, start=1):
            are_strings = isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)
            if not are_strings:
                raise DataError(
                    f"Line {number} of {file} is {reprlib.repr(turns)}. Write a JSON string, or a list of JSON strings "
                    "for a multi-turn session."
                )
    return responses


def files_of(config: Any, setting: str) -> list[str]:
    """Return the files that a setting names, one or several."""
    files = select(config, setting)
    return [files] if isinstance(files, str) else list(files or [])


def sample(config: Any, setting: str, count: int, *, stratify: bool = True) -> Sample:
    """Return rows of a setting's files, and findings about the first invalid row of each kind.

    With `stratify` the rows are a stratified sample of every file (see `stratified`), and at least one row of each
    `data_source` is included. Otherwise they are the first rows of the first file.
    """
    result = Sample({}, [], [])
    fix = OWN_DATASET if has_custom_dataset(config) else ""
    paths = files_of(config, setting)
    for path in paths if stratify else paths[:1]:
        if setting == "data.val_files" and not Path(path).exists():
            continue  # the plan of the run has a note about it
        count_of_file = -(-count // len(paths)) if stratify else count
        with explaining_errors(f"{setting}={path}", fix=fix):
            sample_of_file = _sample_of_file(config, path, count_of_file, stratify, fix)
        result.rows.update(sample_of_file.rows)
        result.prompts.extend(sample_of_file.prompts)
        result.findings.extend(sample_of_file.findings)
    return result


def has_custom_dataset(config: Any) -> bool:
    """Return whether a dataset class of the user reads the files of the data, so that its rows may be others."""
    return select(config, "data.custom_cls.path") is not None


def _sample_of_file(config: Any, path: str, count: int, stratify: bool, fix: str) -> Sample:
    """Return `count` rows of a file, or some more, and what is wrong in all of its rows."""
    _require_columns(path, fix)
    sources = _column(path, "data_source")
    chosen = stratified(sources, count) if stratify else {*range(count)}
    counted = stratified(sources, COUNTED_PROMPTS)
    checker = _RowChecker(config, path, fix)
    rows: dict[str, Row] = {}
    prompts: list[Any] = []
    for number, row in enumerate(_read_rows(path, [*COLUMNS, checker.prompt_key])):
        place = f"row {number} of {path}"
        checker.check(place, row)
        if number in chosen:
            rows[place] = row
        prompt = row.get(checker.prompt_key)
        if number in counted and _are_messages(prompt):
            prompts.append(prompt)
    if stratify:
        sampled_sources = {row["data_source"] for row in rows.values()}
        for (source, _), (place, row) in checker.first_rows.items():
            if source not in sampled_sources:
                rows[place] = row
    return Sample(rows, prompts, checker.findings())


class _RowChecker:
    """Checks the rows of a file one by one, and reports the first invalid row of each kind."""

    def __init__(self, config: Any, path: str, fix: str) -> None:
        self.prompt_key = str(select(config, "data.prompt_key"))
        self.fix = fix
        self.first_rows: dict[tuple[Any, str], tuple[str, Row]] = {}
        """The first row with its place, for each data source and each kind of ground truth in it."""
        self._wrong_prompts: list[Finding] = []
        # `without_prompts` reports a missing column, and a dataset class of the user may read other prompts.
        is_column_missing = self.prompt_key not in column_names(path)
        self._prompt_check_is_done = is_column_missing or has_custom_dataset(config)

    def check(self, place: str, row: Row) -> None:
        """Check a row. Raise if it has no entry for the ground truth."""
        kind = _kind_of_truth(row, place, self.fix)
        self.first_rows.setdefault((row["data_source"], kind), (place, row))
        prompt = row.get(self.prompt_key)
        if not self._prompt_check_is_done and not _are_messages(prompt):
            self._prompt_check_is_done = True
            self._wrong_prompts.append(_wrong_prompt(place, self.prompt_key, prompt, self.fix))

    def findings(self) -> list[Finding]:
        """Return what is wrong in the rows that were checked."""
        places = {source_and_kind: place for source_and_kind, (place, _) in self.first_rows.items()}
        return [*self._wrong_prompts, *_missing_truths(places)]


def without_prompts(config: Any, setting: str) -> Iterator[Finding]:
    """Report each file of a setting that does not have the column of the prompts."""
    prompt_key = select(config, "data.prompt_key")
    if prompt_key is None or has_custom_dataset(config):
        return
    for path in filter(_is_file, files_of(config, setting)):
        names = None
        with suppress(OSError, ValueError):  # verl may read a file that this package cannot read
            names = column_names(path)
        if names is not None and prompt_key not in names:
            yield Finding(
                "error",
                f"{setting}={path} has no column {prompt_key}, which data.prompt_key={prompt_key} names. It has the "
                f"columns {listed(names)}.",
                "Set data.prompt_key to the column with the chat messages.",
            )


def _is_file(path: str) -> bool:
    return Path(path).is_file()


def _require_columns(path: str, fix: str) -> None:
    """Raise if a file lacks a column that verl needs to call the reward function."""
    names = column_names(path)
    for column in ("data_source", "reward_model"):
        if column not in names:
            raise DataError(
                f"{path} has no column {column}, which verl needs to call the reward function. It has the columns "
                f"{listed(names)}. Add the column {column}. {fix}".rstrip()
            )


def _kind_of_truth(row: Row, place: str, fix: str) -> str:
    """Return whether the ground truth is `null`, `empty` or `given`. Raise if the row has no entry for it."""
    model = row["reward_model"]
    if model is None:
        return "null"
    if "ground_truth" not in model:
        raise DataError(
            f"{place[0].upper()}{place[1:]} has no reward_model.ground_truth, which verl needs. Its reward_model has "
            f"the entries {listed(model)}. Add the entry ground_truth. {fix}".rstrip()
        )
    truth = model["ground_truth"]
    if truth is None:
        return "null"
    return "empty" if truth in ("", [], {}) else "given"


def _missing_truths(places: dict[tuple[Any, str], str]) -> Iterator[Finding]:
    """Report rows without a ground truth, unless no row of their data source has one: its function needs none.

    `places` has the first row of each data source with each kind of ground truth.
    """
    for (source, kind), place in places.items():
        if kind != "given" and (source, "given") in places:
            yield Finding(
                "error" if kind == "null" else "note",
                f"{place[0].upper()}{place[1:]}: reward_model.ground_truth is {kind}, unlike other rows of its "
                "data_source.",
                "Remove the row, or add its ground truth.",
            )


def _wrong_prompt(place: str, prompt_key: str, value: Any, fix: str) -> Finding:
    return Finding(
        "error",
        f"{place[0].upper()}{place[1:]}: the column data.prompt_key={prompt_key} is {reprlib.repr(value)}, not chat "
        "messages.",
        f"Write a list of messages, each with the entries role and content. {fix}".rstrip(),
    )


def _are_messages(value: Any) -> bool:
    """Return whether each message has a role and a content; an assistant's content may be a call of a tool."""
    return isinstance(value, list) and all(map(_is_message, value))


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("role") is None:
        return False
    return message.get("content") is not None or message["role"] == "assistant"


def stratified(sources: Sequence[Any], count: int) -> set[int]:
    """Return the numbers of `count` rows, in proportion to the rows of each data source.

    The rows of a single data source are evenly spaced. If there are several, the rows of each are drawn by a seed: the
    sources may alternate, and evenly spaced rows would then all have the same one.

    >>> sorted({number % 3 for number in stratified(["a", "b", "c"] * 10, 10)})
    [0, 1, 2]
    """
    total = len(sources)
    if len({*map(str, sources)}) < 2:
        return {index * total // count for index in range(count)}
    numbers = np.random.default_rng(SEED).permutation(total).tolist()
    numbers.sort(key=lambda number: str(sources[number]))  # keeps the random order within a source
    middles = [(2 * index + 1) * total // (2 * count) for index in range(count)]
    return {numbers[middle] for middle in middles}


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


def _read_rows(path: str, columns: list[str]) -> Iterator[Row]:
    _, parts = batches(path, columns)
    for part in parts:
        yield from part.to_pylist()


def _column(path: str, name: str) -> list[Any]:
    """Return a column of a file."""
    _, parts = batches(path, [name])
    return [value for part in parts for value in part.column(name).to_pylist()]


def column_names(path: str) -> list[str]:
    """Return the names of the columns of a file."""
    import pyarrow.parquet

    if path.endswith(".parquet"):
        return list(pyarrow.parquet.read_schema(path).names)
    _, parts = batches(path, [])
    return list(parts[0].schema.names) if parts else []
