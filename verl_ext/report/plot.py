"""One panel a reward: the mean over the runs of a name, and a band of one standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from verl_ext.errors import ConfigurationError
from verl_ext.report.curves import Groups, curve, title

# Okabe and Ito's colours without yellow, which is faint on white; the line styles tell the curves apart without any.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))


def plot(groups: Groups, metrics: Sequence[str], path: Path, *, smooth: int, heading: str | None = None) -> None:
    """Write the picture, in the format that the path's ending names."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("a picture needs matplotlib: pip install 'verl_ext[plot]', or leave out --plot") from (
            error
        )
    if len(groups) > len(COLOURS):
        raise ConfigurationError(f"{len(groups)} names are too many for one picture, at most {len(COLOURS)}")
    figure = Figure(figsize=(4.6 * len(metrics), 3.6), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        for (name, logs), colour, style in zip(groups.items(), COLOURS, STYLES, strict=False):
            if any(metric not in log.metrics for log in logs):
                continue
            raw = curve(logs, metric)
            found = raw.smooth(smooth)
            label = f"{name} ({len(logs)} runs)" if len(logs) > 1 else name
            panel.plot(found.steps, found.mean, color=colour, linestyle=style, linewidth=2, label=label)
            if len(logs) > 1:
                low, high = found.mean - found.spread, found.mean + found.spread
                panel.fill_between(found.steps, low, high, color=colour, alpha=0.2, linewidth=0)
            else:
                panel.plot(raw.steps, raw.mean, color=colour, linewidth=0.8, alpha=0.4)
        panel.set_title(title(metric))
        panel.set_xlabel("training step")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("mean of the batch" + (f", over {smooth} steps" if smooth > 1 else ""))
    handles, labels = panels[0].get_legend_handles_labels()
    panels[0].legend(handles, labels, frameon=False)
    several = max(map(len, groups.values())) > 1
    note = "line: mean over runs, band: ± 1 standard deviation" if several else None
    if heading or note:
        figure.suptitle("\n".join(filter(None, (heading, note))), fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
