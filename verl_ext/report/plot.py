"""The picture: one panel per quantity, with the mean over the runs of a name and a band of one standard deviation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, Any

from verl_ext.errors import ConfigurationError, printable
from verl_ext.report.curves import Curve, Experiments, curve
from verl_ext.report.log import Log
from verl_ext.report.panels import Panel, columns

# Okabe and Ito's colours without yellow, which is faint on white. The line styles also work without colours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
LEGEND = 0.7
"""Inches of a figure's height that a legend may take, before the figure grows."""


def check_picture(path: Path | None) -> None:
    """Raise if matplotlib is missing, or cannot write the format of the path's ending."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "a picture needs matplotlib: pip install 'matplotlib>=3.7', or leave out --plot and --html"
        ) from error
    endings = [f".{ending}" for ending in sorted(Figure().canvas.get_supported_filetypes()) if ending != "pgf"]
    if path is not None and path.suffix.lower() not in endings:
        problem = f"ends in {path.suffix}" if path.suffix else "has no ending"
        raise ConfigurationError(f"--plot {path} {problem}; valid endings: {', '.join(endings)}")


def plot(
    experiments: Experiments,
    panels: Sequence[Panel],
    file: Path | IO[bytes],
    *,
    smooth: int,
    heading: str | None = None,
) -> None:
    """Write the picture, in the format of the path's ending; as PNG to an open file."""
    from matplotlib import rc_context

    if len(experiments) > len(COLOURS):
        raise ConfigurationError(f"{len(experiments)} names are too many for one picture, at most {len(COLOURS)}")
    with rc_context({"text.parse_math": False}):  # a name with two `$` is not a formula
        _figure(experiments, panels, smooth, heading).savefig(file, dpi=130)


def _figure(experiments: Experiments, panels: Sequence[Panel], smooth: int, heading: str | None) -> Any:
    from matplotlib.figure import Figure

    across = columns(len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(4.6 * across, 3.0 * down + 0.9), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).ravel()
    drawn: dict[str, Any] = {}
    for panel, ax in zip(panels, axes, strict=False):
        absent = []
        for (name, logs), colour, style in zip(experiments.items(), COLOURS, STYLES, strict=False):
            if any(panel.metrics[0] not in log for log in logs):
                absent.append(printable(name))
            for thin, metric in enumerate(panel.metrics):
                if all(metric in log for log in logs):
                    look = {"color": colour, "linestyle": style}
                    line = _draw(ax, curve(logs, metric).after(panel.skip), smooth, look, thin=bool(thin))
                    if not thin:
                        drawn[_label(name, logs)] = line
        _finish(ax, panel, absent)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    for ax in axes[max(0, len(panels) - across) : len(panels)]:
        ax.set_xlabel("training step")
    note = ("; " if across > 1 else "\n").join(_note(experiments, smooth))
    title = "\n".join(filter(None, (heading and printable(heading, keep="\n"), note))) or None
    labels = [label for label in map(_label, experiments, experiments.values()) if label in drawn]
    legend_above(figure, [drawn[label] for label in labels], labels, title=title)
    return figure


def _draw(ax: Any, raw: Curve, smooth: int, look: dict[str, Any], *, thin: bool) -> Any:
    smoothed = raw.smooth(smooth)
    marker = "o" if len(smoothed.steps) == 1 else None  # a line through one point is none
    (line,) = ax.plot(smoothed.steps, smoothed.mean, **look, linewidth=1.0 if thin else 2.0, marker=marker)
    if len(smoothed.values) > 1:
        low, high = smoothed.mean - smoothed.std, smoothed.mean + smoothed.std
        ax.fill_between(smoothed.steps, low, high, color=look["color"], alpha=0.08 if thin else 0.18, linewidth=0)
    elif smooth > 1 and not thin:
        ax.plot(raw.steps, raw.mean, color=look["color"], linewidth=0.8, alpha=0.4)
    return line


def _finish(ax: Any, panel: Panel, absent: Sequence[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    dress(ax, printable(panel.title), panel.unit)
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


def legend(owner: Any, lines: Collection[Any], labels: Collection[str], **look: Any) -> Any:
    """A legend in which every label is as written; matplotlib skips those that begin with `_`."""
    made = owner.legend(lines, map(str, range(len(lines))), frameon=False, **look)
    for text, label in zip(made.get_texts(), labels, strict=True):
        text.set_text(label)
    return made


def legend_above(figure: Any, lines: Collection[Any], labels: Collection[str], *, title: str | None = None) -> None:
    """A legend above the panels, in as many columns as fit; the figure grows where it is too small."""
    columns = max(1, len(lines))
    made = legend(figure, lines, labels, loc="outside upper center", ncols=columns, handlelength=3.5)
    while columns > 1 and made.get_window_extent().width > figure.bbox.width:
        made.remove()
        columns -= 1
        made = legend(figure, lines, labels, loc="outside upper center", ncols=columns, handlelength=3.5)
    if title:
        made.set_title(title)
        made.get_title().set_multialignment("center")
    width, height = made.get_window_extent().size / figure.dpi
    wide, high = figure.get_size_inches()
    figure.set_size_inches(max(wide, width), high + max(0.0, height - LEGEND))


def dress(ax: Any, title: str, unit: str) -> None:
    """What the panels of all pictures have in common."""
    ax.set_title(title)
    ax.set_ylabel(unit)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def _label(name: str, logs: Sequence[Log]) -> str:
    return f"{printable(name)} ({len(logs)} runs)" if len(logs) > 1 else printable(name)


def _note(experiments: Experiments, smooth: int) -> list[str]:
    parts = [f"each point the mean of {smooth} steps"] if smooth > 1 else []
    if max(map(len, experiments.values())) > 1:
        parts += ["line: mean over runs", "band: ± 1 standard deviation"]
    elif smooth > 1:
        parts.append("faint: single steps")
    return parts
