"""How a recipe describes its data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.errors import DataError

Record = Mapping[str, Any]
"""One example of the data set."""
Row = dict[str, Any]
"""One example as verl reads it."""
Message = dict[str, str]


def _all(_: Record) -> bool:
    return True


@dataclass(frozen=True)
class Split:
    """One file to write."""

    name: str
    """Name of the file, `<name>.parquet`, and of the split in `extra_info`."""
    files: tuple[str, ...]
    """Patterns below the folder of the data set. The files of the first one that matches are read, sorted by name."""
    columns: tuple[str, ...]
    """Columns that every record must have."""
    make_row: Callable[[Record, int], Row]
    """Makes the row for a record and its index; may raise `DataError`."""
    hub: str | None = None
    """The data set on the Hugging Face hub; None: that of the plan."""
    rows: Callable[[int], Sequence[int]] | None = None
    """From the number of records to the indices of the split, in the order to write; None: all records."""
    keep: Callable[[Record], bool] = _all
    """Which of these records to write. The others are counted, but are not bad. It may raise `DataError`."""

    def indices(self, records: int) -> Sequence[int]:
        """The indices of the split, given the number of records."""
        return range(records) if self.rows is None else self.rows(records)


@dataclass(frozen=True)
class Plan:
    """A data set: where it is, and how to convert it."""

    name: str
    splits: tuple[Split, ...]
    hub: str | None
    """The data set on the Hugging Face hub; None: it is not there."""
    where: str
    """Where a user gets it, for messages."""


def row(
    *, data_source: str, prompt: Sequence[Message], ability: str, ground_truth: str, split: str, index: int, **more: Any
) -> Row:
    """Make a row in verl's format; raise `DataError` for an invalid prompt. `more` goes into `extra_info`."""
    if not prompt:
        raise DataError("the prompt has no message")
    for message in prompt:
        content = message.get("content")
        if not isinstance(message.get("role"), str) or not isinstance(content, str) or not content.strip():
            raise DataError(f"a message of the prompt is not a role with text, found {str(message)[:200]}")
    return {
        "data_source": data_source,
        "prompt": [{"role": message["role"], "content": message["content"]} for message in prompt],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **more},
    }


def text(record: Record, column: str) -> str:
    """Return the stripped text of a column; raise `DataError` if there is none."""
    value = record[column]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{column!r} is empty or not a string, found {str(value)[:200]!r}")
    return value.strip()
