"""Files of JSON lines, as verl writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
"""The log of a run, which holds no trajectories."""


def json_lines(file: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the record of each line; None for a torn line, which a killed process leaves."""
    with file.open("rb") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            yield record if isinstance(record, dict) else None
