"""Print the table of the tool-calling runs that collect_tools.py stored.

    python scripts/evidence/tools_table.py scripts/evidence/tools

- format, correctness: means over steps 11 to 40 of training, at temperature 1
- test: the 200 test entries, greedy, after the last step; "start" is the first run's validation before training
- dead: share of groups in which all advantages are 0, steps 11 to 40
- r: correlation of the two rewards within groups, pooled over the groups, steps 1 to 10 and 11 to 40
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd

FIRST, LAST = 11, 40


def main() -> None:
    head = ("run", "format", "correctness", "test format", "test correctness", "BFCL", "dead", "r, 1-10", "r, 11-40")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    started = set()
    for run in sorted(Path(sys.argv[1]).glob("*/")):
        start = run.name.split("-")[0]
        before = run / "verdicts-0.jsonl"
        if before.exists() and start not in started:
            started.add(start)
            print(row(f"{start} start", ["", "", *verdicts(before), "", "", ""]))
        rows = pd.read_parquet(run / "rewards.parquet")
        late = rows[rows.step.between(FIRST, LAST)]
        figures = [f"{late[name].mean():.3f}" for name in ("format", "correctness")]
        dead = (late.advantage.abs().groupby([late.step, late.uid]).max() == 0).mean()
        r = [f"{within(part):.2f}" for part in (rows[rows.step < FIRST], late)]
        print(row(run.name, [*figures, *verdicts(run / f"verdicts-{LAST}.jsonl"), f"{dead:.1%}", *r]))


def row(name: str, figures: list[str]) -> str:
    return f"| {' | '.join([name, *figures])} |"


def verdicts(file: Path) -> list[str]:
    """Return the means over the test entries."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [f"{np.mean([line[name] for line in lines]):.3f}" for name in ("format", "correctness", "bfcl")]


def within(rows: pd.DataFrame) -> float:
    """Return the correlation of the rewards after each group's means are taken off."""
    rewards = rows[["format", "correctness"]]
    centred = rewards - rewards.groupby([rows.step, rows.uid]).transform("mean")
    return float(centred.corr().iloc[0, 1])


if __name__ == "__main__":
    main()
