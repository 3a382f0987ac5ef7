"""Markdown tables for the pages."""

from __future__ import annotations

from verl_ext.files import Table


def markdown(rows: Table) -> str:
    """Format the rows, the header first, as a Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
