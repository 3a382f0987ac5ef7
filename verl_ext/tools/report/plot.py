"""The picture: one panel per metric, with the mean over the runs of a name and a band of one standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_ext.tools.picture import COLOURS, STYLES, dress, legend_above, new_figure
from verl_ext.tools.report.curves import Experiments, curve, title, unit


def plot(experiments: Experiments, metrics: Sequence[str], smooth: int) -> Any:
    """Return the figure, with the panels side by side so that the fewest gaps are left."""
    across = min(len(metrics), min((4, 3), key=lambda count: -len(metrics) % count))
    down = -(-len(metrics) // across)
    figure = new_figure(4.6 * across, 3.0 * down + 0.9, len(experiments))
    axes = figure.subplots(down, across, squeeze=False).ravel()
    lines: dict[str, Any] = {}
    for metric, ax in zip(metrics, axes, strict=False):
        for (name, logs), colour, style in zip(experiments.items(), COLOURS, STYLES, strict=False):
            line = _draw(ax, logs, metric, smooth, color=colour, linestyle=style)
            if line is not None:
                lines[f"{name} ({len(logs)} runs)" if len(logs) > 1 else name] = line
        _finish(ax, metric)
    for ax in axes[len(metrics) :]:
        ax.set_visible(False)
    notes = [f"each point the mean of {smooth} steps"] if smooth > 1 else []
    if max(map(len, experiments.values())) > 1:
        notes.append("line: mean over runs, band: ± 1 standard deviation")
    elif smooth > 1:
        notes.append("faint: single steps")
    legend_above(figure, list(lines.values()), list(lines), ("; " if across > 1 else "\n").join(notes))
    return figure


def _draw(ax: Any, logs: Sequence[Any], metric: str, smooth: int, **look: Any) -> Any:
    """Draw the curve of one name and return its line; None if its runs did not log the metric."""
    raw = curve(logs, metric)
    if raw is None:
        return None
    smoothed = raw.rolling(smooth, min_periods=1).mean()
    mean, spread = smoothed.mean(axis="columns"), smoothed.std(axis="columns")
    marker = "o" if len(mean) == 1 else None  # a line through one point is none
    (line,) = ax.plot(mean.index, mean, linewidth=2.0, marker=marker, **look)
    if len(logs) > 1:
        ax.fill_between(mean.index, mean - spread, mean + spread, color=look["color"], alpha=0.18, linewidth=0)
    elif smooth > 1:
        ax.plot(raw.index, raw[0], color=look["color"], linewidth=0.8, alpha=0.4)
    return line


def _finish(ax: Any, metric: str) -> None:
    from matplotlib.ticker import MaxNLocator

    dress(ax, title(metric), unit(metric))
    ax.set_xlabel("training step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    ax.ticklabel_format(axis="y", useOffset=False)
    low, high = ax.get_ylim()
    # A constant curve is drawn flat: do not zoom in on rounding noise.
    least = 0.02 * max(abs(low), abs(high))
    if high - low < least:
        ax.set_ylim((low + high - least) / 2, (low + high + least) / 2)
