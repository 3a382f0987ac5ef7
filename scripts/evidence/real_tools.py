"""Print the tables and draw the plot of tool_calling.md from the stored runs, or extract one run.

    python scripts/evidence/real_tools.py table
    python scripts/evidence/real_tools.py plot docs/pages/pictures/real_tools.png
    python scripts/evidence/real_tools.py extract scarce-grpo-1 outputs/scarce-grpo-1

`extract` writes the files that `verl_ext report` and `verl_ext compare` read. real_tools.parquet contains all runs and
no text. real_tools.txt says how the runs were made. A row has a `run`, a `kind`, a `step`, and more columns by its
kind:

    answer      a response of a training step: `name` of its group, rewards, `advantage`, `tokens`
    metric      `name` and `value` of a metric that verl logged
    test        a greedy response to a test entry (`name`) after this step: rewards, and whether BFCL accepts it
    T=1.0       a response of an initial checkpoint to a validation prompt at this temperature; T=0.0 is greedy
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from markdown_table import markdown
from scipy import stats

from verl_ext.core.batch import Batch
from verl_ext.core.cross_reward import WeightByVariation
from verl_ext.core.groups import Array, Groups, divide
from verl_ext.files import Table
from verl_ext.tools.report.plot import COLORS, dress

Figures = Mapping[tuple[str, str, str], Mapping[str, float]]
"""Results by initial checkpoint, arm and seed."""
STORED = Path(__file__).with_name("real_tools.parquet")
REWARDS = ["correctness", "format"]
MEASURES = ["format", "correctness", "bfcl"]
STEPS = {"scarce": (1, 30), "eight": (1, 30), "mixed": (11, 40), "pure": (11, 40)}
"""The steps of the primary measure, by initial checkpoint. `eight` is `scarce` with seeds 5 to 12."""
WIDTH, GOAL, STEPS_TO = 5, 0.8, "steps to 0.8"
CONTRIBUTION = "contribution of format"
SPANS = (1, 5, 10, 20, 30, 40)
"""The last steps of the spans over which SAW's weights are averaged."""
PAIRS = (
    ("eight", "gdpo", "grpo"),
    ("scarce", "gdpo", "grpo"),
    ("scarce", "gdpo", "weighted"),
    ("mixed", "gdpo", "grpo"),
)
DRAWN = {
    "scarce": "experiment B, seeds 1 to 4",
    "eight": "experiment C, seeds 5 to 12",
    "mixed": "experiment A, seeds 1 to 3",
}
LINES = dict(zip(("grpo", "gdpo", "weighted"), zip(COLORS, ("-", "--", ":"), strict=False), strict=True))


def extract(name: str, folder: Path) -> None:
    """Write metrics.jsonl, which `report` reads, and rewards.parquet for `compare --prompt name`."""
    table = pd.read_parquet(STORED)
    rows = table[table.run == name]
    folder.mkdir(parents=True, exist_ok=True)
    logged = rows[rows.kind == "metric"].groupby("step")
    lines = [{"step": int(step), "data": dict(zip(part.name, part.value, strict=True))} for step, part in logged]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    columns = ["step", "name", *REWARDS, "advantage", "tokens"]
    rows[rows.kind == "answer"][columns].to_parquet(folder / "rewards.parquet", index=False)


@dataclass(frozen=True)
class Run:
    """A stored run and its results."""

    start: str
    arm: str
    seed: str
    answers: pd.DataFrame
    tested: pd.DataFrame
    """The test results after the last step."""

    @property
    def counted(self) -> pd.DataFrame:
        """Return the responses of the steps of the primary measure."""
        return self.answers[self.answers.step.between(*STEPS[self.start])]

    def figures(self) -> dict[str, float]:
        """Return the numbers of the tables."""
        counted = self.counted
        return {
            "format": counted["format"].mean(),
            "correctness": counted["correctness"].mean(),
            STEPS_TO: self.reached(),
            CONTRIBUTION: share(counted),
            **{f"test: {measure}": self.tested[measure].mean() for measure in MEASURES},
        }

    def reached(self) -> float:
        """Return the first step at which the mean of format over five steps is at least 0.8.

        If there is no such step, return the step after the last.
        """
        means = self.answers.groupby("step")["format"].mean().rolling(WIDTH).mean()
        return float(min(means.index[means >= GOAL], default=STEPS[self.start][1] + 1))


def share(answers: pd.DataFrame) -> float:
    """Return the fraction of the variance of the advantages that format explains.

    This is the increase of R² by format, averaged over adding format before and after correctness. The regression, over
    all responses, is that of the advantage on the rewards normalized in their groups.
    """
    groups, values = Groups.of(answers.name.tolist()), answers[REWARDS].to_numpy(float)
    mean, varies = groups.variation(values)
    centered = np.where(groups.broadcast(varies), values - groups.broadcast(mean), 0.0)
    rewards = divide(centered, groups.broadcast(groups.std(centered)))
    advantages = answers.advantage.to_numpy(float)
    correctness, form, both = (fit(advantages, rewards[:, chosen]) for chosen in ([0], [1], [0, 1]))
    return (form + both - correctness) / 2


def fit(advantages: Array, rewards: Array) -> float:
    """Return R² of the regression."""
    columns = np.column_stack([np.ones(len(rewards)), rewards])
    left = advantages - columns @ np.linalg.lstsq(columns, advantages, rcond=1e-10)[0]
    return float(1 - left.var() / advantages.var())


def stored() -> tuple[list[Run], pd.DataFrame]:
    """Return the finished runs, and the test results of the initial checkpoints."""
    table = pd.read_parquet(STORED)
    found = []
    for (name,), rows in table.groupby(["run"]):
        start, *rest = name.split("-")
        if start in STEPS and len(rest) == 2 and rows.step.max() == STEPS[start][1]:
            found.append(Run(start, *rest, rows[rows.kind == "answer"], rows[rows.kind == "test"]))
    found.sort(key=lambda run: (run.start, run.arm, int(run.seed)))
    return found, table[table.run.str.endswith("-start") & (table.kind == "test")]


def print_tables() -> None:
    runs, before = stored()
    found = {(run.start, run.arm, run.seed): run.figures() for run in runs}
    names = list(next(iter(found.values())))
    rows: Table = [("run", *names)]
    for start, part in before.groupby("run"):
        means = {f"test: {measure}": part[measure].mean() for measure in MEASURES}
        rows.append((str(start), *(number(name, means.get(name, np.nan)) for name in names)))
    for run, figures in found.items():
        rows.append(("-".join(run), *map(number, figures, figures.values())))
    print(markdown(rows))
    shown = [pair for pair in PAIRS if pairs(found, *pair, "format")]
    rows = [("difference by seed", *(f"{start}: {one} - {other}" for start, one, other in shown))]
    for name in names:
        columns = [[first - second for first, second in pairs(found, *pair, name)] for pair in shown]
        cells = (filter(None, (number(name, gap, "+") for gap in column)) for column in columns)
        rows.append((name, *map(", ".join, cells)))
        if name in REWARDS:
            rows.append((f"{name}, mean and 95% CI", *map(interval, columns)))
        if name == "format":
            rows.append(("format, standard deviations over seeds", *(spread(found, *pair, name) for pair in shown)))
    print(f"\n{markdown(rows)}\n\n{markdown(saw_weights(runs))}")


def saw_weights(runs: Sequence[Run]) -> Table:
    """Return SAW's weight of format on the responses of each step, averaged over seeds. The two weights sum to 2."""
    found: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        for step, rows in run.answers.groupby("step"):
            batch = Batch.of(rows[REWARDS].to_numpy(float), rows.name.tolist(), keys=REWARDS)
            weights = WeightByVariation(min_values=(-3.0, 0.0)).transform(batch.returns, batch, None).metrics
            span = next(f"to {last}" for last in SPANS if step <= last)
            found.setdefault((f"{run.start}-{run.arm}", span), []).append(weights["weight/format"])
    arms = dict.fromkeys(arm for arm, _ in found)
    cells = {key: f"{np.mean(values):.2f}" for key, values in found.items()}
    spans = [f"to {last}" for last in SPANS]
    return [
        ("SAW's weight of format", *spans),
        *((arm, *(cells.get((arm, span), "") for span in spans)) for arm in arms),
    ]


def number(name: str, value: float, sign: str = "") -> str:
    return "" if np.isnan(value) else format(value, f"{sign}{'.0f' if name == STEPS_TO else '.3f'}")


def interval(found: Sequence[float]) -> str:
    """The mean and its t-interval, of two values or more.

    >>> interval([0.1, 0.2, 0.3])
    '+0.200 [-0.048, +0.448]'
    """
    if len(found) < 2:
        return ""
    mean, half = np.mean(found), stats.t.ppf(0.975, len(found) - 1) * np.std(found, ddof=1) / len(found) ** 0.5
    return f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]"


def spread(found: Figures, start: str, one: str, other: str, name: str) -> str:
    """Return both arms' standard deviations over seeds, and p of the two-sided F-test."""
    values = np.array(pairs(found, start, one, other, name))
    if len(values) < 2:
        return ""
    first, second = values.std(axis=0, ddof=1)
    tail = stats.f.sf(max(first, second) ** 2 / min(first, second) ** 2, len(values) - 1, len(values) - 1)
    return f"{first:.3f} and {second:.3f}, p {2 * tail:.3f}"


def pairs(found: Figures, start: str, one: str, other: str, name: str) -> list[tuple[float, float]]:
    """Return a number of two arms, by seed."""
    return [
        (figures[name], found[start, other, seed][name])
        for (of, arm, seed), figures in found.items()
        if (of, arm) == (start, one) and (start, other, seed) in found
    ]


def draw(path: Path) -> None:
    """Plot each reward over the steps as means of five steps, with one line per run."""
    from matplotlib.figure import Figure

    runs, _ = stored()
    figure = Figure(figsize=(11, 3.6 * len(DRAWN)), layout="constrained")
    for row, (start, title) in zip(figure.subplots(len(DRAWN), 2), DRAWN.items(), strict=True):
        for ax, reward in zip(row, ("format", "correctness"), strict=True):
            for run in runs:
                if run.start == start and run.arm in LINES:
                    color, style = LINES[run.arm]
                    means = run.answers.groupby((run.answers.step - 1) // WIDTH)[reward].mean()
                    steps = WIDTH * means.index + (WIDTH + 1) / 2
                    ax.plot(steps, means, style, color=color, label=run.arm if run.seed in ("1", "5") else None)
            dress(ax, f"{reward}, {title}", "mean reward")
            ax.set_xlabel("training step")
            ax.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table", help="print the tables of the page")
    add = commands.add_parser("plot", help="draw the plot of the page")
    add.add_argument("file", type=Path, help="file for the plot")
    add = commands.add_parser("extract", help="write the files of one run")
    add.add_argument("run", help="name of the run, such as scarce-grpo-1")
    add.add_argument("folder", type=Path, help="output folder")
    chosen = parser.parse_args()
    if chosen.command == "extract":
        extract(chosen.run, chosen.folder)
    elif chosen.command == "plot":
        draw(chosen.file)
    else:
        print_tables()


if __name__ == "__main__":
    main()
