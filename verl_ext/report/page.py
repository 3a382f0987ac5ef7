"""A report as one self-contained HTML file: the picture, the tables, and notes, such as which runs were read."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterable
from typing import IO

from verl_ext.errors import printable
from verl_ext.report.table import Rows

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#111;background:#fff;margin:2rem auto;max-width:75rem}"
    "table{border-collapse:collapse;margin:1rem 0}"
    "th,td{padding:.25rem .8rem;text-align:left;border-bottom:1px solid #ccc}"
    "td{font-variant-numeric:tabular-nums}img{width:100%;height:auto}ul{padding-left:1.2rem}"
)


def page(
    heading: str,
    draw: Callable[[IO[bytes]], None],
    alt: str,
    tables: Iterable[tuple[str, str, Rows]],
    notes: Iterable[str],
    *,
    notes_title: str = "Runs",
) -> str:
    """Return the HTML document. `draw` writes the picture as PNG; a table has a caption, a remark or "", and rows."""
    picture = io.BytesIO()
    draw(picture)
    image = base64.b64encode(picture.getvalue()).decode("ascii")
    body = [
        f"<h1>{_text(heading)}</h1>",
        f'<img src="data:image/png;base64,{image}" alt="{_text(alt)}">',
    ]
    for caption, remark, lines in tables:
        body += [f"<h2>{_text(caption)}</h2>", *([f"<p>{_text(remark)}</p>"] if remark else []), _table(lines)]
    body += [f"<h2>{_text(notes_title)}</h2>", "<ul>", *(f"<li>{_text(note)}</li>" for note in notes), "</ul>"]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{_text(heading)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _text(text: str) -> str:
    return html.escape(printable(text))


def _table(lines: Rows) -> str:
    def row(cells: Iterable[str], kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{_text(cell)}</{kind}>" for cell in cells) + "</tr>"

    return "\n".join(["<table>", row(lines[0], "th"), *(row(line, "td") for line in lines[1:]), "</table>"])
