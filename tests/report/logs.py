"""Logs as verl's file logger writes them."""

from __future__ import annotations

import json


def line(step, **data):
    return json.dumps({"step": step, "data": data}) + "\n"


def write(path, *records):
    """A log of such steps with such metrics, in a folder that is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line(step, **data) for step, data in records))
    return path
