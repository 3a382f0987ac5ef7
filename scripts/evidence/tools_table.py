"""Print the table of the tool-calling runs that collect_tools.py stored.

    python scripts/evidence/tools_table.py scripts/evidence/tools

- format, correctness: means over steps 11 to 40 of training, at temperature 1
- test: the 200 test entries, greedy, after the last step; "start" is the first run's validation before training
- dead: share of groups in which no reward varies, steps 11 to 40
- r: correlation of the two rewards within groups, pooled over the groups, steps 1 to 10 and 11 to 40

Below it: gdpo minus grpo from the mixed start on the test entries, the mean over the seeds that both have, with a 95 %
interval by a paired bootstrap over the entries. It holds for other questions to these models, not for other seeds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

FIRST, LAST = 11, 40
MEASURES = ("format", "correctness", "bfcl")
DRAWS = 10_000


def main() -> None:
    head = ("run", "format", "correctness", "test format", "test correctness", "BFCL", "dead", "r, 1-10", "r, 11-40")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    runs = sorted(Path(sys.argv[1]).glob("*/"))
    before = [run / "verdicts-0.jsonl" for run in runs if (run / "verdicts-0.jsonl").exists()]
    starts = [row(f"{file.parent.name.split('-')[0]} start", ["", "", *verdicts(file), "", "", ""]) for file in before]
    print("\n".join(dict.fromkeys(starts)))  # one for all runs that began with the same model
    for run in runs:
        rows = pd.read_parquet(run / "rewards.parquet")
        later = late(rows)
        figures = [f"{later[name].mean():.3f}" for name in ("format", "correctness")]
        r = [f"{within(part):.2f}" for part in (rows[rows.step < FIRST], later)]
        print(row(run.name, [*figures, *verdicts(run / f"verdicts-{LAST}.jsonl"), f"{dead(later):.1%}", *r]))
    pairs = [
        (run, other) for run in runs if (other := run.with_name(run.name.replace("mixed-grpo-", "mixed-gdpo-"))) != run
    ]
    compare([pair for pair in pairs if pair[1].exists()])


def row(name: str, figures: list[str]) -> str:
    return f"| {' | '.join([name, *figures])} |"


def verdicts(file: Path) -> list[str]:
    """Return the means over the test entries."""
    return [f"{mean:.3f}" for mean in judged(file).mean()]


def judged(file: Path) -> pd.DataFrame:
    """Return the verdicts, a row per entry."""
    return pd.read_json(file, lines=True).set_index("id")[list(MEASURES)]


def compare(pairs: list[tuple[Path, Path]]) -> None:
    """Print the differences of the second runs to the first."""
    name = f"verdicts-{LAST}.jsonl"
    found = sum(judged(new / name) - judged(old / name) for old, new in pairs) / len(pairs)
    drawn = np.random.default_rng(0).integers(len(found), size=(DRAWS, len(found)))
    print(f"\ngdpo minus grpo, seeds: {len(pairs)}, mean over {len(found)} entries, 95 % by bootstrap over them:\n")
    for measure in MEASURES:
        low, high = np.quantile(found[measure].to_numpy()[drawn].mean(axis=1), (0.025, 0.975))
        print(f"- {measure}: {found[measure].mean():+.3f} [{low:+.3f}, {high:+.3f}]")


def late(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the steps that the primary measure is about."""
    return rows[rows.step.between(FIRST, LAST)]


def dead(rows: pd.DataFrame) -> float:
    """Return the share of groups in which no reward varies."""
    varied = rows.groupby(["step", "uid"])[["format", "correctness"]].nunique() > 1
    return float(1 - varied.any(axis=1).mean())


def within(rows: pd.DataFrame) -> float:
    """Return the correlation of the rewards after each group's means are taken off."""
    rewards = rows[["format", "correctness"]]
    centred = rewards - rewards.groupby([rows.step, rows.uid]).transform("mean")
    return float(centred.corr().iloc[0, 1])


if __name__ == "__main__":
    main()
