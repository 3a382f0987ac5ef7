"""Read lines of JSON. Any of them may be incomplete: a killed process leaves half a line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_ext.errors import DataError

LONGEST = 308
"""An integer with at most so many digits fits a float."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse(text: bytes) -> Any:
    r"""Parse a JSON text in UTF-8.

    Raises:
        DataError: The text is not JSON, or holds a value that callers cannot use: an integer of more than 308 digits,
            half a surrogate pair, or lists that are nested too deeply for Python.

    >>> parse(b'{"step": 1}\n')
    {'step': 1}
    """
    try:
        decoded = text.decode("utf-8")
        value = _DECODER.decode(decoded)
        if _SURROGATE.search(decoded):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise DataError(str(error)) from error
    return value


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The non-blank lines of a file, numbered from 1. Only a newline ends a line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line


def _integer(digits: str) -> int:
    if (count := len(digits.lstrip("-"))) > LONGEST:
        raise ValueError(f"an integer of {count} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_integer)
