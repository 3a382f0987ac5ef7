"""Print the differences between two configs over pairs of runs with the same seed.

    python scripts/evidence/paired_runs.py outputs/pairs gdpo grpo-clean --steps 1 30

A run is a folder CONFIG-SEED with verl's metrics.jsonl, or a file CONFIG-SEED.jsonl. A reward is averaged over the
steps. A metric of the validation is that of the last step. Runs without the rewards of all steps are left out, and a
note names them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd
from markdown_table import markdown
from real_tools import interval, number

from verl_ext.errors import DataError
from verl_ext.files import Table
from verl_ext.tools.report.logs import find_log, read_log

REWARD = re.compile(r"reward/(.+)/mean")
VALIDATION = re.compile(r"val-(?:core|aux)/.+/mean@\d+")
Results = dict[str, float]


def runs_of(folder: Path, config: str) -> dict[int, Path]:
    """Return the runs of a config by seed."""
    found: dict[int, Path] = {}
    for run in sorted(folder.iterdir()):
        name = re.fullmatch(rf"{re.escape(config)}-(\d+)(?:\.jsonl)?", run.name)
        if name is None:
            continue
        seed = int(name[1])
        if seed in found:
            raise DataError(f"{found[seed]} and {run} are runs with the same config and seed. Remove one of them.")
        found[seed] = run
    if not found:
        raise DataError(f"{folder} has no run of {config}: neither a folder {config}-SEED nor a {config}-SEED.jsonl.")
    return found


def results(table: pd.DataFrame, first: int, last: int) -> Results:
    """Return the mean of each reward over the steps, and the metrics of the validation after the last step."""
    rewards = {name: reward[1] for name in table.columns if (reward := REWARD.fullmatch(name))}
    if not rewards:
        raise DataError("it has no metrics of rewards.")
    counted = table.reindex(range(first, last + 1))
    missing = counted.index[counted[[*rewards]].isna().any(axis=1)]
    if len(missing) > 0:
        raise DataError(f"the rewards of {len(missing)} of {len(counted)} steps are missing, first step {missing[0]}.")
    means = {reward: float(counted[name].mean()) for name, reward in rewards.items()}
    at_the_end = counted.loc[last].dropna()
    validated = {name: float(value) for name, value in at_the_end.items() if VALIDATION.fullmatch(name)}
    return {**means, **validated}


def complete_runs(folder: Path, config: str, first: int, last: int) -> tuple[dict[int, Results], list[str]]:
    """Return the results of the complete runs of a config by seed, and a sentence about each other run."""
    complete = {}
    notes = []
    for seed, run in runs_of(folder, config).items():
        try:
            complete[seed] = results(read_log(find_log(run)).table, first, last)
        except DataError as error:
            notes.append(f"{run.name} is left out: {error}")
    return complete, notes


def unpaired(one: Mapping[int, Results], other: Mapping[int, Results]) -> Iterator[str]:
    """Yield a sentence about each seed and each metric that not all runs have.

    >>> list(unpaired({1: {"format": 0.5}, 3: {}}, {3: {"format": 1.0}}))
    ['Seed 1 is left out: only one config has a complete run.', 'format is left out: not every run has it.']
    """
    for seed in sorted(one.keys() ^ other.keys()):
        yield f"Seed {seed} is left out: only one config has a complete run."
    runs = [*one.values(), *other.values()]
    for name in dict.fromkeys(name for run in runs for name in run):
        if not all(name in run for run in runs):
            yield f"{name} is left out: not every run has it."


def differences(one: Mapping[int, Results], other: Mapping[int, Results]) -> tuple[list[int], dict[str, list[float]]]:
    """Return the seeds of both configs, and for each result of all their runs the difference by seed.

    >>> differences({1: {"format": 0.5}, 3: {"format": 0.25}}, {3: {"format": 1.0}})
    ([3], {'format': [-0.75]})
    """
    seeds = sorted(one.keys() & other.keys())
    runs = [run for of_config in (one, other) for run in of_config.values()]
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return seeds, {name: [one[seed][name] - other[seed][name] for seed in seeds] for name in names}


def print_differences(folder: Path, one: str, other: str, first: int, last: int) -> None:
    """Print a note about everything that is left out, and the table."""
    results_of_one, notes = complete_runs(folder, one, first, last)
    results_of_other, other_notes = complete_runs(folder, other, first, last)
    for note in [*notes, *other_notes, *unpaired(results_of_one, results_of_other)]:
        print(f"note: {note}")
    if not results_of_one.keys() & results_of_other.keys():
        raise DataError(f"{folder} has no complete runs of {one} and {other} with the same seed.")
    seeds, by_name = differences(results_of_one, results_of_other)
    rows: Table = [(f"{one} - {other}", f"seeds {', '.join(map(str, seeds))}", "mean and 95% CI")]
    for name, gaps in by_name.items():
        rows.append((name, ", ".join(number(name, gap, "+") for gap in gaps), interval(gaps)))
    print(markdown(rows))


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
    first, last = options.steps
    if first > last:
        parser.error(f"the first step ({first}) comes after the last ({last}).")
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is no folder.")
    try:
        print_differences(options.folder, options.one, options.other, first, last)
    except DataError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
