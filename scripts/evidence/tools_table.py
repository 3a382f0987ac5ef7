"""Print the table of the tool-calling runs that collect_tools.py stored.

    python scripts/evidence/tools_table.py outputs/evidence-stored

Below the table: gdpo minus grpo, both from the mixed start. A seed is a pair: both runs see the same questions in the
same order and begin with the same answers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

FIRST, LAST = 11, 40
MEASURES = ("format", "correctness", "bfcl")
DRAWS = 10_000
LEGEND = f"""\
Training, temperature 1, steps {FIRST} to {LAST}: mean format and correctness; dead, the share of groups in which no
reward varies; r, the correlation of the two rewards within groups. Test, greedy, after step {LAST}: means over the
entries."""

BRACKETS = """\
Brackets: 95 % by bootstrap over the test entries. They hold for other questions to these models, not for other seeds.
By category, the mean of the seeds:"""


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
    print(f"\n{LEGEND}")
    old = sorted(Path(sys.argv[1]).glob("mixed-grpo-*/"))
    compare([(run, new) for run in old if (new := run.with_name(run.name.replace("grpo", "gdpo"))).exists()])


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
    parts = [[late(pd.read_parquet(run / "rewards.parquet")) for run in pair] for pair in pairs]
    print("\ngdpo minus grpo, seed by seed:\n")
    for measure in ("format", "correctness"):
        print(f"- {measure}, training: {signed(new[measure].mean() - old[measure].mean() for old, new in parts)}")
    name = f"verdicts-{LAST}.jsonl"
    found = [judged(new / name) - judged(old / name) for old, new in pairs]
    mean = sum(found) / len(found)
    drawn = np.random.default_rng(0).integers(len(mean), size=(DRAWS, len(mean)))
    for measure in MEASURES:
        bounds = np.quantile(mean[measure].to_numpy()[drawn].mean(axis=1), (0.025, 0.975))
        seeds = signed(part[measure].mean() for part in found)
        print(f"- {measure}, test: {seeds}; mean {mean[measure].mean():+.3f} [{signed(bounds)}]")
    print(f"\n{BRACKETS}\n\n| BFCL's category | entries | start | grpo | gdpo |\n|---|---|---|---|---|")
    start = judged(min(run / "verdicts-0.jsonl" for run, _ in pairs))
    arms = [pd.concat(judged(run / name) for run in runs) for runs in zip(*pairs, strict=True)]
    accepted = [part["bfcl"].groupby(lambda entry: entry.rsplit("_", 1)[0]).mean() for part in (start, *arms)]
    for category, count in start.index.str.rsplit("_", n=1).str[0].value_counts().items():
        print(row(category, [str(count), *(f"{part[category]:.3f}" for part in accepted)]))


def signed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:+.3f}" for value in values)


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
