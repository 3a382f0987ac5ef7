"""What all pictures share: colours, panels, and how they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_ext.errors import ConfigurationError

# Okabe and Ito's colours without yellow, which is faint on white. The line styles also work without colours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))


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
