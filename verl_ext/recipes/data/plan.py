"""What a recipe says about its data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.errors import DataError

Record = Mapping[str, Any]
"""One example as the data set has it."""
Row = dict[str, Any]
"""One example as verl reads it."""
Message = dict[str, str]


def _all(_: Record) -> bool:
    return True


@dataclass(frozen=True)
class Split:
    """One file to write."""

    name: str
    """Of the file, `<name>.parquet`, and in `extra_info`."""
    files: tuple[str, ...]
    """Patterns below the data set's folder; those of the first that matches are read, in the order of their names."""
    columns: tuple[str, ...]
    """What every record must have."""
    make_row: Callable[[Record, int], Row]
    """The row for a record and its index, or `DataError`."""
    hub: str | None = None
    """The data set on the Hugging Face hub; None: the plan's."""
    rows: Callable[[int], Sequence[int]] | None = None
    """Of so many records, the indices of those that belong to the split, in the order to write; None: all."""
    keep: Callable[[Record], bool] = _all
    """Which of those the user asked for; the others are counted, not bad. It may raise `DataError`."""

    def indices(self, records: int) -> Sequence[int]:
        """The indices that belong to the split, of so many records."""
        return range(records) if self.rows is None else self.rows(records)


@dataclass(frozen=True)
class Plan:
    """A data set: where it is, and what becomes of it."""

    name: str
    splits: tuple[Split, ...]
    hub: str | None
    """The data set on the Hugging Face hub; None: it is on none."""
    where: str
    """For messages: how a user gets it."""


def row(
    *, data_source: str, prompt: Sequence[Message], ability: str, ground_truth: str, split: str, index: int, **more: Any
) -> Row:
    """A row in verl's format, or `DataError` if verl could not use it; `more` goes into `extra_info`."""
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
    """A column that must hold text, or `DataError`."""
    found = record[column]
    if not isinstance(found, str) or not found.strip():
        raise DataError(f"{column!r} is not a text with content, found {str(found)[:200]!r}")
    return found.strip()
