"""The picture: how large the advantages are, and how they differ from grpo's."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from verl_ext.compare.measures import Bins
from verl_ext.core.groups import Array
from verl_ext.errors import ConfigurationError, printable
from verl_ext.report.plot import COLOURS, legend, legend_above

if TYPE_CHECKING:
    from verl_ext.compare.command import Comparison

_MARKERS = ("o", "s", "^", "D", "v", "P")
_POINTS = 4000


def draw(result: Comparison, file: Path | IO[bytes]) -> None:
    """Write the picture, in the format of the path's ending; as PNG to an open file."""
    from matplotlib import rc_context

    count, most = len(result.labels) - 1, len(COLOURS) - 1
    if count > most:
        raise ConfigurationError(f"{count} variants are too many for a picture, at most {most}")
    with rc_context({"text.parse_math": False}):  # a name with two `$` is not a formula
        _figure(result).savefig(file, dpi=130)


def _figure(result: Comparison) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.8, 7.6), layout="constrained")
    axes = figure.subplots(2, 3)
    labels = [*map(printable, result.labels)]
    lines = _binned(axes[0, 0], result.level, [found.by_accuracy for found in result.measures])
    axes[0, 0].set_title("Which prompts get the weight: mean |A|")
    if result.length is not None:
        means = [found.by_length for found in result.measures if found.by_length is not None]
        _binned(axes[0, 1], result.length, means)
        axes[0, 1].set_title("Which lengths get the weight: mean |A|")
    else:
        axes[0, 1].set_visible(False)
    _explained(axes[0, 2], result, labels)
    _shares(axes[1, 0], result, labels)
    _scatter(axes[1, 1], result)
    _sorted(axes[1, 2], result)
    for ax in axes.ravel():
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_axisbelow(True)
    legend_above(figure, lines, labels)
    return figure


def _binned(ax: Any, bins: Bins, means: list[Array]) -> list[Any]:
    """One line for each estimator, and the share of the trajectories in each bin behind them."""
    places = np.arange(len(bins.labels))
    behind = ax.twinx()
    share = bins.counts / bins.counts.sum()
    behind.bar(places, share, color="#bbbbbb", alpha=0.45, width=0.9)
    behind.set_ylim(0, max(1.0, 2.2 * share.max()))
    behind.set_yticks([])
    behind.spines[["top", "right"]].set_visible(False)
    for place, height in zip(places, share, strict=True):
        behind.annotate(f"{height:.0%}", (place, 0.01), ha="center", va="bottom", fontsize=8, color="#555555")
    ax.set_zorder(behind.get_zorder() + 1)
    ax.patch.set_visible(False)
    lines = []
    for values, colour, marker in zip(means, COLOURS, _MARKERS, strict=False):
        lines += ax.plot(places, values, color=colour, marker=marker, linewidth=1.8, markersize=5)
    ax.set_xticks(places, bins.labels)
    ax.set_xlabel(f"{printable(bins.title)}; grey: share of trajectories")
    ax.set_ylim(bottom=0)
    ax.grid(axis="y", alpha=0.25)
    return lines


def _explained(ax: Any, result: Comparison, labels: list[str]) -> None:
    """Stacked bars: what explains the variance of the advantage."""
    places = np.arange(len(labels))[::-1]
    shares = np.array([(*found.explained, 1 - sum(found.explained)) for found in result.measures])
    names = [*map(printable, result.rewards), "rest"]
    fills = [*map(str, np.linspace(0.2, 0.75, len(result.rewards))), "white"]
    hatches = ["", "///", "...", "xxx", "\\\\\\", "++"]
    left = np.zeros(len(labels))
    handles = []
    for at, fill in enumerate(fills):
        last = at == len(fills) - 1
        bars = ax.barh(
            places,
            np.nan_to_num(shares[:, at]),
            left=left,
            height=0.62,
            color=fill,
            edgecolor="#999999" if last else "white",
            hatch=None if last else hatches[at % len(hatches)],
            linewidth=0.6,
        )
        handles.append(bars[0])
        for place, share, start in zip(places, shares[:, at], left, strict=True):
            if share > 0.08:
                colour = "#333333" if last or float(fill) > 0.55 else "white"
                box = {"facecolor": fill, "edgecolor": "none", "pad": 1}
                look = {"ha": "center", "va": "center", "fontsize": 8, "color": colour, "bbox": box}
                ax.text(start + share / 2, place, f"{share:.0%}", **look)
        left = left + np.nan_to_num(shares[:, at])
    ax.set_yticks(places, labels)
    ax.set_xlim(0, 1)
    ax.set_xticks([])
    ax.set_title("What explains A: share of its variance")
    legend(ax, handles, names, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=min(len(names), 4), fontsize=9)


def _shares(ax: Any, result: Comparison, labels: list[str]) -> None:
    """Bars: advantages of 0, dead groups, and signs that turn."""
    kinds = ("dead groups", "A = 0", "other sign than grpo")
    width = 0.8 / len(labels)
    upright = {"rotation": 90} if len(labels) > 3 else {}  # side by side they would overlap
    highest = 0.0
    for at, found in enumerate(result.measures):
        heights = (found.dead, found.zero, found.turned)
        highest = max(highest, *heights)
        places = np.arange(len(kinds)) + (at - (len(labels) - 1) / 2) * width
        ax.bar(places, heights, width=0.9 * width, color=COLOURS[at])
        for place, height in zip(places, heights, strict=True):
            ax.text(place, height, f"{height:.0%}", ha="center", va="bottom", fontsize=8, **upright)
    ax.set_xticks(np.arange(len(kinds)), kinds)
    ax.set_ylim(0, max(1.15 * highest, 0.01))
    ax.set_yticks([])
    ax.set_title("Share of groups, and of trajectories")


def _scatter(ax: Any, result: Comparison) -> None:
    """Each estimator's advantage against grpo's."""
    rows = np.arange(len(result.rollouts.step))
    if len(rows) > _POINTS:
        rows = np.sort(np.random.default_rng(0).choice(rows, _POINTS, replace=False))
    base = result.outcomes[0].advantages[rows]
    for outcome, colour, marker in zip(result.outcomes[1:], COLOURS[1:], _MARKERS[1:], strict=False):
        ax.plot(base, outcome.advantages[rows], marker, color=colour, markersize=3.2, alpha=0.35, markeredgewidth=0)
    low, high = base.min(), base.max()
    ax.plot([low, high], [low, high], color=COLOURS[0], linewidth=1.2)
    ax.axhline(0, color="#999999", linewidth=0.7)
    ax.axvline(0, color="#999999", linewidth=0.7)
    drawn = f" ({len(rows):,} trajectories drawn)" if len(rows) < len(result.rollouts.step) else ""
    ax.set_xlabel(f"A of grpo{drawn}")
    ax.set_title("A against grpo's; line: the same A")
    ax.grid(alpha=0.25)


def _sorted(ax: Any, result: Comparison) -> None:
    """Each estimator's advantages by size."""
    shares = np.linspace(0, 1, 501)
    for outcome, colour in zip(result.outcomes, COLOURS, strict=False):
        ax.plot(shares, np.quantile(outcome.advantages, shares), color=colour, linewidth=1.8)
    ax.axhline(0, color="#999999", linewidth=0.7)
    ax.set_xlabel("share of trajectories with at most this A")
    ax.set_title("A by size")
    ax.grid(alpha=0.25)
