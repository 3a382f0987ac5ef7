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
    rows, columns = _grid(len(metrics))
    figure: Any = Figure(figsize=(4.6 * columns, 3.0 * rows + 0.9), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    line_of_label: dict[str, Any] = {}
    for metric, panel in zip(metrics, panels, strict=False):
        line_of_label |= _draw_panel(panel, experiments, metric, window)
    for unused_panel in panels[len(metrics) :]:
        unused_panel.set_visible(False)
    figure.legend(
        line_of_label.values(),
        line_of_label,
        ncols=columns,
        title=_explanation(experiments, window),
        loc="outside upper center",
        frameon=False,
        handlelength=3.5,
    )
    return figure


def _grid(panels: int) -> tuple[int, int]:
    """Return the rows and the columns of a grid with 4 or 3 columns, whichever leaves fewer places empty.

    >>> _grid(2), _grid(5), _grid(8), _grid(9)
    ((1, 2), (2, 3), (2, 4), (3, 3))
    """
    columns = 4 if -panels % 4 <= -panels % 3 else 3
    columns = min(columns, panels)
    rows = -(-panels // columns)  # rounded up
    return rows, columns


def _draw_panel(panel: Any, experiments: Experiments, metric: str, window: int) -> dict[str, Any]:
    """Draw the curves of a metric. Return the line of each experiment by its label in the legend."""
    from matplotlib.ticker import MaxNLocator

    line_of_label = {}
    for (name, logs), color, style in zip(experiments.items(), COLORS, STYLES, strict=False):
        line = _draw_curve(panel, logs, metric, window, color=color, linestyle=style)
        if line is not None:
            label = f"{name} ({len(logs)} runs)" if len(logs) > 1 else name
            line_of_label[label] = line
    dress(panel, title(metric), unit(metric))
    panel.set_xlabel("training step")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    panel.ticklabel_format(axis="y", useOffset=False)
    _widen(panel, SMALLEST_SPAN * scale(experiments, metric))
    return line_of_label


def _draw_curve(panel: Any, logs: Sequence[Log], metric: str, window: int, **style: Any) -> Any:
    """Draw the curve of one experiment and return its line; None if its runs did not log the metric."""
    values = curve(logs, metric)
    if values is None:
        return None
    averages = values.rolling(window, min_periods=1).mean()
    mean = averages.mean(axis="columns")
    std = averages.std(axis="columns")
    marker = "o" if len(mean) == 1 else None  # a line through one point is invisible
    (line,) = panel.plot(mean.index, mean, linewidth=2.0, marker=marker, **style)
    if len(logs) > 1:
        panel.fill_between(mean.index, mean - std, mean + std, color=style["color"], alpha=0.18, linewidth=0)
    if window > 1:
        panel.plot(values.index, values.mean(axis="columns"), color=style["color"], linewidth=0.8, alpha=0.4)
    return line


def _explanation(experiments: Experiments, window: int) -> str:
    """Say what the lines and bands of a plot are."""
    sentences = []
    if window > 1:
        sentences.append(f"thick line: moving average over {window} steps, thin line: single steps")
    if max(map(len, experiments.values())) > 1:
        sentences.append("several runs: lines are means over the runs, band: ± 1 standard deviation")
    return "\n".join(sentences)


def _widen(panel: Any, span: float) -> None:
    """Make the y-axis span at least so much."""
    low, high = panel.get_ylim()
    if high - low < span:
        middle = (low + high) / 2
        panel.set_ylim(middle - span / 2, middle + span / 2)


def dress(panel: Any, heading: str, label: str) -> None:
    """Give a panel its title, the label of its y-axis, and a grid."""
    panel.set_title(heading)
    panel.set_ylabel(label)
    panel.grid(alpha=0.25)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> None:
    """Write the plot, and create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:  # the message of matplotlib lists the supported suffixes
        raise ConfigurationError(
            f"--plot={path} cannot be written. {error}. Use one of the supported formats as the suffix of the file."
        ) from error
