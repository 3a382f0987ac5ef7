"""Tables as text, as Markdown, and in a page. A table is a list of rows of text, the header first."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence

Rows = list[tuple[str, ...]]

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#111;background:#fff;margin:2rem auto;max-width:75rem}"
    "table{border-collapse:collapse;margin:1rem 0}"
    "th,td{padding:.25rem .8rem;text-align:left;border-bottom:1px solid #ccc}"
    "td{font-variant-numeric:tabular-nums}img{width:100%;height:auto}ul{padding-left:1.2rem}"
)


def plain(rows: Rows) -> str:
    """Align the columns, with a line below the header.

    >>> print(plain([("a", "b"), ("10", "2")]))
    a   b
    -----
    10  2
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


def markdown(rows: Rows) -> str:
    r"""Format the rows as a Markdown table.

    >>> print(markdown([("a", "b"), ("1", "x|y")]))
    | a | b |
    |---|---|
    | 1 | x\|y |
    """
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def page(heading: str, notes: Iterable[str], picture: bytes, tables: Iterable[tuple[str, str, Rows]]) -> str:
    """Return one self-contained HTML document. `picture` is a PNG; a table has a caption, a remark or "", and rows."""
    image = base64.b64encode(picture).decode("ascii")
    body = [f"<h1>{html.escape(heading)}</h1>", "<ul>", *(f"<li>{html.escape(note)}</li>" for note in notes), "</ul>"]
    body.append(f'<img src="data:image/png;base64,{image}" alt="{html.escape(heading)}">')
    for caption, remark, rows in tables:
        cells = [_row(rows[0], "th"), *(_row(row, "td") for row in rows[1:])]
        body += [f"<h2>{html.escape(caption)}</h2>", f"<p>{html.escape(remark)}</p>", "<table>", *cells, "</table>"]
    head = f'<meta charset="utf-8">\n<title>{html.escape(heading)}</title>\n<style>{_STYLE}</style>'
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _row(cells: Sequence[str], kind: str) -> str:
    return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + "</tr>"
