"""Print the differences between two configs over pairs of runs with the same seed.

    python scripts/evidence/paired_runs.py outputs/pairs gdpo grpo-clean --steps 1 30

A run is a folder CONFIG-SEED with verl's metrics.jsonl, or a file CONFIG-SEED.jsonl. A reward is averaged over the
steps. A metric of the validation is that of the last step.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from markdown_table import markdown
from real_tools import interval, number

from verl_ext.errors import DataError
from verl_ext.files import Table
from verl_ext.tools.report.logs import find_log, read_log

REWARD = re.compile(r"reward/(.+)/mean")
VALIDATION = re.compile(r"val-(?:core|aux)/.+/mean@\d+")


def results(table: pd.DataFrame, first: int, last: int) -> dict[str, float]:
    """Return the mean of each reward over the steps, and the metrics of the validation after the last step."""
    counted = table.loc[first:last]
    found = {}
    for name in table.columns:
        if reward := REWARD.fullmatch(name):
            found[reward[1]] = counted[name].mean()
        elif VALIDATION.fullmatch(name) and pd.notna(counted.at[last, name]):
            found[name] = counted.at[last, name]
    return found


def runs_of(folder: Path, config: str, first: int, last: int) -> tuple[dict[int, dict[str, float]], list[str]]:
    """Return the results of the complete runs of a config by seed, and a sentence about each other run."""
    complete = {}
    notes = []
    for run in sorted(folder.iterdir()):
        name = re.fullmatch(rf"{re.escape(config)}-(\d+)", run.stem)
        if name is None:
            continue
        try:
            table = read_log(find_log(run)).table
        except DataError as error:
            notes.append(f"{run.name} is left out: {error}")
            continue
        missing = [step for step in range(first, last + 1) if step not in table.index]
        if missing:
            notes.append(f"{run.name} is left out: {len(missing)} of the steps are missing, first step {missing[0]}.")
        else:
            complete[int(name[1])] = results(table, first, last)
    return complete, notes


def differences(
    one: Mapping[int, Mapping[str, float]], other: Mapping[int, Mapping[str, float]]
) -> tuple[list[int], dict[str, list[float]]]:
    """Return the seeds of both configs, and for each result of all their runs the difference by seed.

    >>> differences({1: {"format": 0.5}, 3: {"format": 0.25}}, {3: {"format": 1.0}})
    ([3], {'format': [-0.75]})
    """
    seeds = sorted(one.keys() & other.keys())
    names = [name for name in one[seeds[0]] if all(name in run[seed] for run in (one, other) for seed in seeds)]
    return seeds, {name: [one[seed][name] - other[seed][name] for seed in seeds] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the runs of both configs")
    parser.add_argument("one", help="config whose results are reduced by those of the other")
    parser.add_argument("other", help="other config")
    parser.add_argument(
        "--steps",
        type=int,
        nargs=2,
        default=[1, 30],
        metavar=("FIRST", "LAST"),
        help="first and last step to use (default: %(default)s)",
    )
    options = parser.parse_args()
    one, notes = runs_of(options.folder, options.one, *options.steps)
    other, other_notes = runs_of(options.folder, options.other, *options.steps)
    for note in [*notes, *other_notes]:
        print(f"note: {note}")
    if not one.keys() & other.keys():
        parser.exit(
            1,
            f"error: {options.folder} has no two complete runs of {options.one} and {options.other} "
            "with the same seed.\n",
        )
    seeds, by_name = differences(one, other)
    rows: Table = [(f"{options.one} - {options.other}", f"seeds {', '.join(map(str, seeds))}", "mean and 95% CI")]
    for name, gaps in by_name.items():
        rows.append((name, ", ".join(number(name, gap, "+") for gap in gaps), interval(gaps)))
    print(markdown(rows))


if __name__ == "__main__":
    main()
