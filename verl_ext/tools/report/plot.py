"""Draw a panel per metric: the moving average of each experiment, and its standard deviation over the runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_ext.errors import ConfigurationError
from verl_ext.tools.report.curves import Experiments, curve, scale, title, unit
from verl_ext.tools.report.logs import Log

# Okabe and Ito's colors without yellow, which is faint on white. The line styles also work without colors.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
SMALLEST_SPAN = 1e-3
"""A y-axis spans at least this fraction of the scale of its metric, so that tiny changes look tiny."""


def plot(experiments: Experiments, metrics: Sequence[str], window: int) -> Any:
    """Return the figure. A thick line is the moving average over `window` logged steps, a thin line has each step."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ConfigurationError(
            "--plot needs the package matplotlib, which is not installed. "
            "Install it with: pip install 'matplotlib>=3.7'"
        ) from error
    if len(experiments) > len(COLORS):
        raise ConfigurationError(
            f"A plot can show at most {len(COLORS)} names, but the runs have {len(experiments)} names. Remove some "
            "runs, or use the same NAME= for runs that are seeds of one experiment."
        )
    columns = min(len(metrics), min((4, 3), key=lambda count: -len(metrics) % count))  # the fewest empty places
    rows = -(-len(metrics) // columns)
    figure: Any = Figure(figsize=(4.6 * columns, 3.0 * rows + 0.9), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    lines: dict[str, Any] = {}
    for metric, ax in zip(metrics, axes, strict=False):
        for (name, logs), color, style in zip(experiments.items(), COLORS, STYLES, strict=False):
            line = _draw(ax, logs, metric, window, color=color, linestyle=style)
            if line is not None:
                lines[f"{name} ({len(logs)} runs)" if len(logs) > 1 else name] = line
        dress(ax, title(metric), unit(metric))
        ax.set_xlabel("training step")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        ax.ticklabel_format(axis="y", useOffset=False)
        _widen(ax, SMALLEST_SPAN * scale(experiments, metric))
    for ax in axes[len(metrics) :]:
        ax.set_visible(False)
    legend = {"loc": "outside upper center", "frameon": False, "handlelength": 3.5}
    figure.legend(lines.values(), lines, ncols=columns, title=_explanation(experiments, window), **legend)
    return figure


def _explanation(experiments: Experiments, window: int) -> str:
    """Say what the lines and bands of a plot are."""
    texts = []
    if window > 1:
        texts.append(f"thick line: moving average over {window} steps, thin line: single steps")
    if max(map(len, experiments.values())) > 1:
        texts.append("several runs: lines are means over the runs, band: ± 1 standard deviation")
    return "\n".join(texts)


def _draw(ax: Any, logs: Sequence[Log], metric: str, window: int, **style: Any) -> Any:
    """Draw the curve of one name and return its line; None if its runs did not log the metric."""
    raw = curve(logs, metric)
    if raw is None:
        return None
    smoothed = raw.rolling(window, min_periods=1).mean()
    mean, std = smoothed.mean(axis="columns"), smoothed.std(axis="columns")
    marker = "o" if len(mean) == 1 else None  # a line through one point is invisible
    (line,) = ax.plot(mean.index, mean, linewidth=2.0, marker=marker, **style)
    if len(logs) > 1:
        ax.fill_between(mean.index, mean - std, mean + std, color=style["color"], alpha=0.18, linewidth=0)
    if window > 1:
        ax.plot(raw.index, raw.mean(axis="columns"), color=style["color"], linewidth=0.8, alpha=0.4)
    return line


def _widen(ax: Any, span: float) -> None:
    """Make the y-axis span at least so much."""
    low, high = ax.get_ylim()
    if high - low < span:
        middle = (low + high) / 2
        ax.set_ylim(middle - span / 2, middle + span / 2)


def dress(ax: Any, heading: str, scale: str) -> None:
    """Give a panel its title, its unit, and a grid."""
    ax.set_title(heading)
    ax.set_ylabel(scale)
    ax.grid(alpha=0.25)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> None:
    """Write the plot, and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:  # the message of matplotlib lists the supported suffixes
        message = (
            f"--plot={path} cannot be written. {error}. Use one of the supported formats as the suffix of the file."
        )
        raise ConfigurationError(message) from error
