"""The picture: which prompts get the weight, what explains the advantages, and how many give no signal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verl_ext.tools.compare.measures import Bins, Measures
from verl_ext.tools.picture import COLOURS, dress, legend_above, new_figure

_MARKERS = ("o", "s", "^", "D", "v", "P")
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++")


def draw(labels: Sequence[str], measures: Sequence[Measures], level: Bins, rewards: Sequence[str], title: str) -> Any:
    """Return the figure of three panels."""
    figure = new_figure(15.5, 5.4, len(labels))
    figure.get_layout_engine().set(w_pad=0.1)
    weight, explained, shares = figure.subplots(1, 3, width_ratios=(1.1, 1, 1))
    lines = _weight(weight, measures, level)
    _explained(explained, labels, measures, rewards)
    _shares(shares, measures)
    legend_above(figure, lines, labels, title)
    return figure


def _weight(ax: Any, measures: Sequence[Measures], level: Bins) -> list[Any]:
    """Draw one line for each estimator, with intervals; the estimators stand beside one another in each bin."""
    places = np.arange(len(level.labels))
    shift = 0.5 / len(measures)
    lines = []
    for at, (found, colour, marker) in enumerate(zip(measures, COLOURS, _MARKERS, strict=False)):
        x = places + (at - (len(measures) - 1) / 2) * shift
        mean, half = found.by_level.T
        some = ~np.isnan(mean)
        look = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.6, "elinewidth": 1, "capsize": 2}
        lines.append(ax.errorbar(x[some], mean[some], yerr=np.nan_to_num(half[some]), **look))
    ax.axhline(1, color="#999999", linewidth=0.8)
    labels = [f"{label}\n{count:,}" for label, count in zip(level.labels, level.counts, strict=True)]
    ax.set_xticks(places, labels, fontsize=9)
    ax.set_xlabel(f"{level.title}; below: number of groups")
    ax.set_ylim(bottom=0)
    dress(ax, "Which prompts get the weight", "mean |A|, 1: as the average group")
    return lines


def _explained(ax: Any, labels: Sequence[str], measures: Sequence[Measures], rewards: Sequence[str]) -> None:
    """Stack what explains the variance of the advantage, one bar an estimator."""
    from matplotlib.ticker import PercentFormatter

    places = np.arange(len(labels))[::-1]
    shares = np.array([found.explained for found in measures])
    fills = [*map(str, np.linspace(0.2, 0.75, len(rewards))), "white"]
    left = np.zeros(len(labels))
    for at, (name, fill) in enumerate(zip((*rewards, "rest"), fills, strict=True)):
        rest = at == len(rewards)
        hatch = None if rest else _HATCHES[at % len(_HATCHES)]
        widths = np.nan_to_num(shares[:, at])
        edge = "#999999" if rest else "white"
        ax.barh(places, widths, left=left, height=0.62, color=fill, edgecolor=edge, hatch=hatch, lw=0.6, label=name)
        for place, share, start in zip(places, widths, left, strict=True):
            if share > 0.08:
                colour = "#333333" if rest or float(fill) > 0.55 else "white"
                box = {"facecolor": fill, "edgecolor": "none", "pad": 1}
                look = {"ha": "center", "va": "center", "fontsize": 9, "color": colour, "bbox": box}
                ax.text(start + share / 2, place, f"{share:.0%}", **look)
        left = left + widths
    dress(ax, "What explains the advantages", "")
    ax.set_yticks(places, labels)
    ax.set_xlim(0, 1.02)  # so that no edge is cut off
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.set_xlabel("share of the variance of A")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=min(len(fills), 4), frameon=False, fontsize=9)


def _shares(ax: Any, measures: Sequence[Measures]) -> None:
    """Draw shares of groups and of trajectories with their intervals."""
    from matplotlib.ticker import PercentFormatter

    kinds = ("groups in which\nevery A is 0", "trajectories\nwith A = 0", "other sign\nthan grpo")
    width, highest = 0.8 / len(measures), 0.1
    for at, found in enumerate(measures):
        shares = (found.dead, found.zero, found.turned)[: 3 if at else 2]
        places = np.arange(len(shares)) + (at - (len(measures) - 1) / 2) * width
        heights = np.array([share.value for share in shares])
        highest = max(highest, *(share.high for share in shares))
        around = [[share.value - share.low for share in shares], [share.high - share.value for share in shares]]
        look = {"ecolor": "#888888", "capsize": 2, "error_kw": {"elinewidth": 1}}
        ax.bar(places, heights, width=0.9 * width, color=COLOURS[at], yerr=around, **look)
    ax.set_xticks(np.arange(len(kinds)), kinds)
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.set_ylim(0, 1.05 * highest)
    dress(ax, "How many give no signal, or another", "share, with 95 % interval")
