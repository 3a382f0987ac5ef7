"""Draw the tool-calling runs that collect_tools.py stored.

    python scripts/evidence/tools_picture.py scripts/evidence/tools docs/pages/pictures/real_tools.png

- Curves of grpo and gdpo: each reward, the share of groups in which no reward varies, and the correlation of the two
  rewards within groups. A point is the mean of the seeds, over five steps; the band reaches from the least seed to the
  largest. The steps of the primary measure are right of the dotted line.
- Points, one a run from the mixed start: the primary measure, and what BFCL's checker accepts of the test answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tools_table import FIRST, LAST, dead, judged, late, within

from verl_ext.tools.picture import COLOURS, STYLES, dress, legend_above, new_figure

WIDTH = 5
"""Steps of a point."""
Arms = dict[str, dict[Path, pd.DataFrame]]
"""The rows of the runs of each arm, by the run's folder."""
COLOUR = dict(zip(("grpo", "gdpo"), COLOURS, strict=False))


def main() -> None:
    runs: Arms = {}
    for run in sorted(Path(sys.argv[1]).glob("mixed-*/")):
        rows = pd.read_parquet(run / "rewards.parquet")
        runs.setdefault(run.name.split("-")[1], {})[run] = rows
    arms = {arm: runs.pop(arm) for arm in ("grpo", "gdpo")}
    start = judged(min(Path(sys.argv[1]).glob("mixed-*/verdicts-0.jsonl")))  # the same for all
    figure = new_figure(14, 7, len(arms))
    panels = figure.subplots(2, 3)
    curve(panels[0, 0], arms, "format", "mean reward", lambda rows: rows["format"].mean())
    curve(panels[0, 1], arms, "correctness", "mean reward", lambda rows: rows["correctness"].mean())
    curve(panels[0, 2], arms, "groups in which no reward varies", "share of groups", dead)
    curve(panels[1, 0], arms, "correlation of the rewards within groups", "Pearson's r", within)
    points(panels[1, 1], arms | runs, "primary measure", f"format, steps {FIRST} to {LAST}", primary)
    points(panels[1, 2], arms | runs, "BFCL's checker (dotted: before RL)", "share of test answers accepted", accepted)
    panels[1, 2].axhline(start["bfcl"].mean(), color="grey", linestyle=":")
    names = [f"{arm} ({len(seeds)} seeds)" for arm, seeds in arms.items()]
    legend_above(figure, panels[0, 0].lines[: len(names)], names)
    figure.savefig(sys.argv[2], dpi=110)


def curve(ax: Any, arms: Arms, title: str, unit: str, figure: Callable[..., float]) -> None:
    """Draw a figure of each arm over the steps, and the seeds' range as a band."""
    for (_, seeds), colour, style in zip(arms.items(), COLOURS, STYLES, strict=False):
        found = np.array(
            [[figure(part) for _, part in rows.groupby((rows.step - 1) // WIDTH)] for rows in seeds.values()]
        )
        steps = WIDTH * np.arange(found.shape[1]) + (WIDTH + 1) / 2
        ax.plot(steps, found.mean(axis=0), style, color=colour)
        ax.fill_between(steps, found.min(axis=0), found.max(axis=0), color=colour, alpha=0.15, linewidth=0)
    ax.axvline(FIRST - 0.5, color="grey", linestyle=":")
    dress(ax, title, unit)
    ax.set_xlabel("training step")


def points(ax: Any, arms: Arms, title: str, unit: str, figure: Callable[..., float]) -> None:
    """Draw one point a run, and a line between the first two arms' runs of one seed."""
    values = [[figure(run, rows) for run, rows in seeds.items()] for seeds in arms.values()]
    for pair in zip(*values[:2], strict=False):
        ax.plot(pair, color="lightgrey", zorder=1)
    for at, (arm, column) in enumerate(zip(arms, values, strict=True)):
        ax.plot([at] * len(column), column, "o", color=COLOUR.get(arm, "black"), alpha=0.7)
    ax.set_xticks(range(len(arms)), [arm.replace("_", "\n") for arm in arms])
    ax.set_xlim(-0.5, len(arms) - 0.5)
    dress(ax, title, unit)


def primary(_: Path, rows: pd.DataFrame) -> float:
    return float(late(rows)["format"].mean())


def accepted(run: Path, _: pd.DataFrame) -> float:
    return float(judged(run / f"verdicts-{LAST}.jsonl")["bfcl"].mean())


if __name__ == "__main__":
    main()
