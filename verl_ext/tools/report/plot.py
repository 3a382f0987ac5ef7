"""The picture: a panel per metric that varies, with the mean over the runs of a name, and a band of its std."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_ext.errors import ConfigurationError
from verl_ext.tools.report.curves import Experiments, constant, curve, title, unit

# Okabe and Ito's colors without yellow, which is faint on white. The line styles also work without colors.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
SMOOTH = 5
"""Steps that each point averages."""


def plot(experiments: Experiments, metrics: Sequence[str]) -> Any:
    """Return the figure, with the panels side by side so that the fewest gaps are left."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ConfigurationError("a picture needs matplotlib: pip install 'matplotlib>=3.7'") from error
    if len(experiments) > len(COLOURS):
        raise ConfigurationError(f"{len(experiments)} names are too many for one picture, at most {len(COLOURS)}")
    across = min(len(metrics), min((4, 3), key=lambda count: -len(metrics) % count))
    down = -(-len(metrics) // across)
    figure: Any = Figure(figsize=(4.6 * across, 3.0 * down + 0.9), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).ravel()
    lines: dict[str, Any] = {}
    for metric, ax in zip(metrics, axes, strict=False):
        if (value := constant(experiments, metric)) is not None:
            ax.text(0.5, 0.5, f"{title(metric)}: {value} throughout", ha="center")
            ax.set_axis_off()
            continue
        for (name, logs), color, style in zip(experiments.items(), COLOURS, STYLES, strict=False):
            line = _draw(ax, logs, metric, color=color, linestyle=style)
            if line is not None:
                lines[f"{name} ({len(logs)} runs)" if len(logs) > 1 else name] = line
        dress(ax, title(metric), unit(metric))
        ax.set_xlabel("training step")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        ax.ticklabel_format(axis="y", useOffset=False)
    for ax in axes[len(metrics) :]:
        ax.set_visible(False)
    several = max(map(len, experiments.values())) > 1
    more = "line: mean over runs, band: ± 1 standard deviation" if several else "faint: single steps"
    heading = f"each point the mean of {SMOOTH} steps\n{more}"
    look = {"loc": "outside upper center", "frameon": False, "handlelength": 3.5, "title": heading}
    figure.legend(lines.values(), lines, ncols=across, **look)
    return figure


def _draw(ax: Any, logs: Sequence[Any], metric: str, **look: Any) -> Any:
    """Draw the curve of one name and return its line; None if its runs did not log the metric."""
    raw = curve(logs, metric)
    if raw is None:
        return None
    smoothed = raw.rolling(SMOOTH, min_periods=1).mean()
    mean, spread = smoothed.mean(axis="columns"), smoothed.std(axis="columns")
    marker = "o" if len(mean) == 1 else None  # a line through one point is none
    (line,) = ax.plot(mean.index, mean, linewidth=2.0, marker=marker, **look)
    if len(logs) > 1:
        ax.fill_between(mean.index, mean - spread, mean + spread, color=look["color"], alpha=0.18, linewidth=0)
    else:
        ax.plot(raw.index, raw[0], color=look["color"], linewidth=0.8, alpha=0.4)
    return line


def dress(ax: Any, heading: str, scale: str) -> None:
    """Give a panel its title, its unit, and a grid."""
    ax.set_title(heading)
    ax.set_ylabel(scale)
    ax.grid(alpha=0.25)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> None:
    """Write the picture, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:  # matplotlib lists the endings that it knows
        raise ConfigurationError(f"{path}: {error}") from error
