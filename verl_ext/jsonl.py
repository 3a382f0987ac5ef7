"""Read lines of JSON, any of which may be torn: a killed process leaves half a line behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_ext.errors import DataError

LONGEST = 308
"""Digits of an integer that always fits a float."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse(text: bytes) -> Any:
    r"""The value of a JSON text in UTF-8.

    Raises:
        DataError: The text is not JSON, or holds what nothing after it can use: an integer of more than 308 digits,
            half a surrogate pair, lists nested deeper than Python reads.

    >>> parse(b'{"step": 1}\n')
    {'step': 1}
    """
    try:
        decoded = text.decode("utf-8")
        found = _DECODER.decode(decoded)
        if _SURROGATE.search(decoded):
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise DataError(str(error)) from error
    return found


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers from 1; only a newline ends a line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def _integer(digits: str) -> int:
    if (count := len(digits.lstrip("-"))) > LONGEST:
        raise ValueError(f"an integer of {count} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_integer)
