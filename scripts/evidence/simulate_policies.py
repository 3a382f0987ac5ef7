"""Train small policies with exact gradients, and compare the other estimators with grpo over many seeds.

    python scripts/evidence/simulate_policies.py    # about a minute: estimators_compared.json, the tables, the picture

A policy is a softmax over a few answers per prompt, so the gradient of its log-probabilities is exact. The advantages
come from this package's estimators. docs/pages/estimators_compared.md states the model and shows the results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from markdown_table import markdown
from softmax_policies import CONSTANT, EVERY, SEQUENCE, TOKEN, Arm, Condition, Study, World, rates, train

from verl_ext.tools.picture import COLOURS, dress
from verl_ext.tools.tables import Rows

PAGES = Path(__file__).parents[2] / "docs" / "pages"
RESULTS = Path(__file__).with_name("estimators_compared.json")
PAGE, PICTURE = PAGES / "estimators_compared.md", PAGES / "pictures" / "estimators_compared.png"
SEEDS = range(20)

ONE_RIGHT = ((1, 0),) + ((0, 0),) * 7
STUDIES = {
    "drgrpo": Study(
        "Do wrong answers grow where length is free?",
        (
            Arm(f"grpo, {SEQUENCE}", loss=SEQUENCE),
            Arm(f"grpo, {TOKEN}"),
            Arm(f"drgrpo, {CONSTANT}", "drgrpo", loss=CONSTANT),
            Arm(f"drgrpo, {SEQUENCE}", "drgrpo", {"check_loss": False}, loss=SEQUENCE),
        ),
        ("length of wrong answers", "all prompts"),
        ONE_RIGHT[:4],
        lengths=tuple(range(32, 257, 32)),
    ),
    "dgpo": Study(
        "Do the hardest prompts gain?",
        (Arm("grpo"), Arm("dgpo", "dgpo"), Arm("dgpo without DQW", "dgpo", {"dqw": False})),
        ("hardest third", "easiest third"),
        ONE_RIGHT,
    ),
    "hadw": Study(
        "Do the hardest prompts gain with 4 rollouts?",
        (Arm("grpo"), Arm("hadw", "hadw"), Arm("hadw, lambda_scale=1", "hadw", {"lambda_scale": 1.0})),
        ("hardest third", "easiest third"),
        ONE_RIGHT,
        rollouts=4,
    ),
    "gdpo": Study(
        "Does the reward of small scale gain?",
        (Arm("grpo"), Arm("gdpo", "gdpo")),
        ("format", "all prompts"),
        ((1, 1), (1, 0), (0, 1), (0, 0)) * 2,
        keys=("correctness", "format"),
        scales=(6.0, 1.0),
    ),
}

CONDITIONS = {
    "SGD, same step": Condition(same_step=True),
    "Adam": Condition(adam=True, mixed=True),
    "Adam by prompt": Condition(adam=True),
}
STYLES = dict(zip(CONDITIONS, ("-", "--", ":"), strict=True))
Results = Mapping[str, Mapping[str, Any]]
"""By study and condition: the rates, and of each arm the measures after the last step by seed, and a curve."""


def compute(study: Study, condition: Condition) -> dict[str, Any]:
    """Every arm on every seed."""
    rate, found, curves = rates(study, condition), {}, {}
    for arm in study.arms:
        runs = [train(World(study, seed), arm, rate[arm.label], condition) for seed in SEEDS]
        found[arm.label] = {name: [round(float(run[name][-1]), 7) for run in runs] for name in study.measures}
        curves[arm.label] = np.array([run[study.measures[0]] for run in runs])
    return {"rates": rate, "values": found, "curves": {label: line(study, curves, label) for label in curves}}


def line(study: Study, curves: Mapping[str, np.ndarray], label: str) -> list[list[float]]:
    """The first measure against the baseline, or for lengths the start: its mean over the seeds, and 95 % of it."""
    from scipy import stats

    values = curves[label]
    gap = values - (values[:, :1] if len(study.lengths) > 1 else curves[study.arms[0].label])
    error = stats.t.ppf(0.975, len(gap) - 1) * gap.std(axis=0, ddof=1) / len(gap) ** 0.5
    return [gap.mean(axis=0).round(6).tolist(), error.round(6).tolist()]


def table(study: Study, found: Mapping[str, Any]) -> str:
    """A row per condition, arm and measure: both values, their difference, and p of a paired t test."""
    from scipy import stats

    base, *others = (arm.label for arm in study.arms)
    rows: Rows = [("learning", "estimator", "measure", f"with {base}", "with it", "difference", "p")]
    for condition, one in found.items():
        for label in others:
            for name in study.measures:
                before, after = (np.array(one["values"][arm][name]) for arm in (base, label))
                p = stats.ttest_rel(after, before).pvalue
                form = ".1f" if name.startswith("length") else ".3f"
                cells = [f"{x.mean():{form}} ± {x.std(ddof=1):{form}}" for x in (before, after)]
                gap = f"{(after - before).mean():+{form}} ± {(after - before).std(ddof=1):{form}}"
                # Where p is tiny its size says nothing, because the differences are not exactly normal.
                rows.append((condition, label, name, *cells, gap, f"{p:.2g}" if p >= 1e-6 else "< 1e-6"))
    return markdown(rows)


def filled(page: str, results: Results) -> str:
    """The page with its tables replaced."""
    for name, study in STUDIES.items():
        start, end = f"<!-- made: {name} -->\n", "<!-- end -->"
        before, _, after = page.partition(start)
        page = f"{before}{start}\n{table(study, results[name])}\n\n{end}{after.partition(end)[2]}"
    return page


def draw(results: Results) -> None:
    """The first measure of each study over the steps: against the baseline, or for lengths against the start."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 7.6), layout="constrained")
    for ax, (key, study) in zip(figure.subplots(2, 2).ravel(), STUDIES.items(), strict=True):
        name, long = study.measures[0], len(study.lengths) > 1
        for condition, style in STYLES.items():
            for colour, arm in zip(COLOURS, study.arms if long else study.arms[1:], strict=False):
                mean, error = (np.array(x) for x in results[key][condition]["curves"][arm.label])
                steps = np.arange(len(mean)) * EVERY
                ax.plot(steps, mean, style, color=colour, label=arm.label if style == "-" else None)
                ax.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.18, linewidth=0)
        ax.axhline(0, color="#888888", linewidth=0.8)
        dress(ax, f"{study.question}\n{name}: change {'since the start' if long else 'against grpo'}", "")
        ax.title.set_fontsize(10)
        ax.set_xlabel("training step")
        ax.legend(fontsize=8, frameon=False)
    words = dict(zip(STYLES, ("solid", "dashed", "dotted"), strict=True))
    title = "; ".join(f"{words[condition]}: {condition}" for condition in STYLES)
    figure.suptitle(f"{title}; band: 95 % interval of the mean over {len(SEEDS)} seeds", fontsize=11)
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    results = {
        key: {name: compute(study, condition) for name, condition in CONDITIONS.items()}
        for key, study in STUDIES.items()
    }
    RESULTS.write_text(json.dumps(results) + "\n", encoding="utf-8")
    draw(results)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
