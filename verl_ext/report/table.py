"""How each reward began and ended, as text."""

from __future__ import annotations

from collections.abc import Sequence

from verl_ext.report.curves import Array, Groups, curve, spread, title


def table(groups: Groups, metrics: Sequence[str], *, window: int) -> str:
    """A line for each metric and name: the means of its first and last `window` steps, ± their spread over the runs."""
    lines = [("reward", "name", "runs", "steps", f"first {window}", f"last {window}", "change")]
    for metric in metrics:
        for name, logs in groups.items():
            if any(metric not in log.metrics for log in logs):
                lines.append((title(metric), name, str(len(logs)), "not logged", "", "", ""))
                continue
            found = curve(logs, metric)
            first, last = found.values[:, :window].mean(axis=1), found.values[:, -window:].mean(axis=1)
            steps = f"{found.steps[0]}-{found.steps[-1]}"
            values = (number(first), number(last), number(last - first, sign=True))
            lines.append((title(metric), name, str(len(logs)), steps, *values))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([rows[0], "-" * len(rows[0]), *rows[1:]])


def number(values: Array, *, sign: bool = False) -> str:
    """The mean of one value a run, ± their spread where there are several.

    >>> import numpy as np
    >>> number(np.array([1.0, 2.0])), number(np.array([0.5]), sign=True)
    ('1.500 ± 0.707', '+0.500')
    """
    mean = f"{values.mean():+.3f}" if sign else f"{values.mean():.3f}"
    return f"{mean} ± {float(spread(values)):.3f}" if len(values) > 1 else mean
