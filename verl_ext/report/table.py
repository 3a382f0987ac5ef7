"""A table of the first, final and best values and the area of each reward, as text and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from verl_ext.errors import printable
from verl_ext.report.curves import Array, Experiments, curve, standard_deviation, title

Rows = list[tuple[str, ...]]


def rows(experiments: Experiments, metrics: Sequence[str], *, window: int) -> Rows:
    """A header, and a line for each metric and name, ± standard deviation over the runs.

    `first` and `final` are means over `window` steps, `best` is the highest mean over `window` consecutive steps, and
    `area` is the mean height of the curve.
    """
    lines: Rows = [("reward", "name", "runs", "steps", f"first {window}", f"final {window}", f"best {window}", "area")]
    for metric in metrics:
        for name, logs in experiments.items():
            if any(metric not in log for log in logs):
                lines.append((title(metric), name, str(len(logs)), "not logged", "", "", "", ""))
                continue
            shown = curve(logs, metric)
            first, final = shown.values[:, :window].mean(axis=1), shown.values[:, -window:].mean(axis=1)
            # Only full windows: the mean over fewer steps is noisier. A run shorter than the window has none.
            best = shown.smooth(window).values[:, min(window, len(shown.steps)) - 1 :].max(axis=1)
            steps = f"{shown.steps[0]}-{shown.steps[-1]}"
            lines.append((title(metric), name, str(len(logs)), steps, *map(number, (first, final, best, shown.area))))
    return lines


def plain(lines: Rows) -> str:
    """Align the columns, with a line below the header."""
    lines = [tuple(map(printable, line)) for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([padded[0], "-" * len(padded[0]), *padded[1:]])


def markdown(lines: Rows) -> str:
    r"""Format the rows as a Markdown table.

    >>> print(markdown([("a", "b"), ("1", "x|y")]))
    | a | b |
    |---|---|
    | 1 | x\|y |
    """
    written = ["| " + " | ".join(printable(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([written[0], "|" + "---|" * len(lines[0]), *written[1:]])


def number(values: Array) -> str:
    """The mean over the runs, ± their standard deviation if there are several.

    >>> import numpy as np
    >>> number(np.array([1.0, 2.0])), number(np.array([0.5]))
    ('1.500 ± 0.707', '0.500')
    """
    mean = f"{values.mean():.3f}"
    return f"{mean} ± {float(standard_deviation(values)):.3f}" if len(values) > 1 else mean
