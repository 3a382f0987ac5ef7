"""The picture: one panel per quantity, with the mean over the runs of a name and a band of one standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_ext.tools.picture import COLOURS, STYLES, dress, legend_above, new_figure
from verl_ext.tools.report.curves import Experiments, Panel, curve


def plot(experiments: Experiments, panels: Sequence[Panel], smooth: int, heading: str | None) -> Any:
    """Return the figure, with the panels side by side so that the fewest gaps are left."""
    across = min(len(panels), min((4, 3), key=lambda count: -len(panels) % count))
    down = -(-len(panels) // across)
    figure = new_figure(4.6 * across, 3.0 * down + 0.9, len(experiments))
    axes = figure.subplots(down, across, squeeze=False).ravel()
    drawn: dict[str, Any] = {}
    for at, (panel, ax) in enumerate(zip(panels, axes, strict=False)):
        absent = []
        for (name, logs), colour, style in zip(experiments.items(), COLOURS, STYLES, strict=False):
            line = _draw(ax, logs, panel, smooth, colour, style)
            if line is None:
                absent.append(name)
            else:
                drawn[f"{name} ({len(logs)} runs)" if len(logs) > 1 else name] = line
        _finish(ax, panel, absent)
        if at >= len(panels) - across:
            ax.set_xlabel("training step")
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    notes = [f"each point the mean of {smooth} steps"] if smooth > 1 else []
    if max(map(len, experiments.values())) > 1:
        notes.append("line: mean over runs, band: ± 1 standard deviation")
    elif smooth > 1:
        notes.append("faint: single steps")
    note = ("; " if across > 1 else "\n").join(notes)
    legend_above(figure, list(drawn.values()), list(drawn), "\n".join(filter(None, (heading, note))))
    return figure


def _draw(ax: Any, logs: Sequence[Any], panel: Panel, smooth: int, colour: str, style: Any) -> Any:
    """Draw the curves of one name; return the line of the first metric, None if it was not logged."""
    first = None
    for at, metric in enumerate(panel.metrics):
        found = curve(logs, metric)
        if found is None:
            continue
        raw = found if len(found) <= panel.skip else found.iloc[panel.skip :]
        smoothed = raw.rolling(smooth, min_periods=1).mean()
        mean, spread = smoothed.mean(axis="columns"), smoothed.std(axis="columns")
        marker = "o" if len(mean) == 1 else None  # a line through one point is none
        look = {"color": colour, "linestyle": style, "linewidth": 1.0 if at else 2.0, "marker": marker}
        (line,) = ax.plot(mean.index, mean, **look)
        first = line if at == 0 else first
        if len(logs) > 1:
            shade = {"color": colour, "alpha": 0.08 if at else 0.18, "linewidth": 0}
            ax.fill_between(mean.index, mean - spread, mean + spread, **shade)
        elif smooth > 1 and at == 0:
            ax.plot(raw.index, raw[0], color=colour, linewidth=0.8, alpha=0.4)
    return first


def _finish(ax: Any, panel: Panel, absent: Sequence[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    dress(ax, panel.title, panel.unit)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    ax.ticklabel_format(axis="y", useOffset=False)
    low, high = ax.get_ylim()
    # A constant curve is drawn flat: do not zoom in on rounding noise.
    least = 0.02 * max(abs(low), abs(high))
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
    if panel.share:
        low, high = max(low, -0.03), min(high, 1.03)
    ax.set_ylim(low, high)
    if absent:
        text = "not logged: " + ",\n".join(absent)
        ax.text(0.99, 0.02, text, transform=ax.transAxes, ha="right", va="bottom", fontsize=8, color="#555555")
