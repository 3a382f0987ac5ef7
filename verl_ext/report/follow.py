"""`report --follow`: show running trainings in the terminal, and redraw whenever their logs have grown."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from verl_ext.errors import DataError, printable
from verl_ext.report.curves import Array, Experiments, curve, rewards, title
from verl_ext.report.panels import CAPABILITY
from verl_ext.report.table import Rows, plain

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40
BESIDE = (
    "advantage/zero_share",
    *(f"{name}/capability_posterior" for name in CAPABILITY),
    "response_length/mean",
    "timing_s/step",
)
"""Metrics shown below the rewards, if they are logged."""


def sparkline(values: Array) -> str:
    """Draw a curve in one line of text. Each mark is the mean over its share of the steps.

    >>> import numpy as np
    >>> sparkline(np.arange(8.0)), sparkline(np.array([1.0, 1.0]))
    ('▁▂▃▄▅▆▇█', '▁▁')
    """
    count = min(WIDTH, len(values))
    edges = [round(at * len(values) / count) for at in range(count + 1)]
    means = [float(values[low:high].mean()) for low, high in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def frame(experiments: Experiments, metrics: Sequence[str] | None, *, window: int) -> str:
    """The text to show now."""
    chosen = list(metrics or rewards(experiments))
    lines: Rows = [("metric", "name", "runs", "step", f"mean of last {window}", "lowest", "highest", "curve")]
    for metric in [*chosen, *(extra for extra in BESIDE if not metrics and extra not in chosen)]:
        for name, logs in experiments.items():
            present = [log for log in logs if metric in log]
            if not present:
                continue
            try:
                shown = curve(present, metric)
            except DataError:  # the runs have no step in common yet
                continue
            mean = shown.mean
            last = f"{mean[-window:].mean():.3f}"
            ends = f"{mean.min():.3f}", f"{mean.max():.3f}"
            lines.append((title(metric), name, str(len(present)), str(shown.steps[-1]), last, *ends, sparkline(mean)))
    return plain(lines)


def follow(
    read: Callable[[], Experiments],
    draw: Callable[[Experiments], str],
    out: TextIO,
    *,
    interval: float,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Draw until interrupted. Wait for logs that do not exist yet."""
    shown = ""
    try:
        while True:
            try:
                text = draw(read())
            except DataError as error:  # nothing is logged yet
                text = printable(f"waiting: {error}")
            if text != shown:
                shown = text
                out.write(("\x1b[H\x1b[2J" if out.isatty() else "") + text + "\n")
                out.flush()
            sleep(interval)
    except KeyboardInterrupt:
        out.write("\n")
