"""What all pictures share: colours, legends, and how they are written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_ext.errors import ConfigurationError

# Okabe and Ito's colours without yellow, which is faint on white. The line styles also work without colours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
CHARACTERS, HANDLE, LINE = 10, 10, 0.22
"""In a legend: characters in an inch, the width of a line before its label in characters, inches between lines."""


def new_figure(width: float, height: float, curves: int) -> Any:
    """Return an empty figure for so many curves, each with a colour of its own."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("a picture needs matplotlib: pip install 'matplotlib>=3.7'") from error
    if curves > len(COLOURS):
        raise ConfigurationError(f"{curves} names are too many for one picture, at most {len(COLOURS)}")
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write the picture, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:  # matplotlib lists the endings that it knows
        raise ConfigurationError(f"{path}: {error}") from error


def dress(ax: Any, title: str, unit: str) -> None:
    """Give a panel its title, its unit, and a grid."""
    ax.set_title(title)
    ax.set_ylabel(unit)
    ax.grid(alpha=0.25)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def legend_above(figure: Any, lines: Sequence[Any], labels: Sequence[str], title: str = "") -> None:
    """Put a legend above the panels, in as many columns as fit; the figure grows by its further lines."""
    width, height = figure.get_size_inches()
    columns = max(1, min(len(labels), int(CHARACTERS * width / (HANDLE + max(map(len, labels), default=0)))))
    look = {"loc": "outside upper center", "frameon": False, "handlelength": 3.5, "title": title}
    figure.legend(lines, labels, ncols=columns, **look).get_title().set_multialignment("center")
    rows = -(-len(labels) // columns) + title.count("\n")
    figure.set_figheight(height + LINE * (rows - 1))
