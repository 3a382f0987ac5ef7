"""Print tables as text. A table is a list of rows of text; the first row is the header."""

Table = list[tuple[str, ...]]


def plain(rows: Table) -> str:
    """Align the columns, and draw a line below the header.

    >>> print(plain([("a", "b"), ("10", "2")]))
    a   b
    -----
    10  2
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])
