"""Train small policies with exact gradients, and compare other estimators with grpo over many seeds.

    python scripts/evidence/simulate_policies.py    # about a minute: writes estimators_compared.json and prints tables

A policy is a softmax over a few responses per prompt, so the gradient of its log-probabilities is exact. The advantages
are computed by the estimators of verl_ext. simulated_policies.md defines the model and shows the results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from markdown_table import markdown
from softmax_policies import CONSTANT, SEQUENCE, TOKEN, Arm, Condition, Study, World, rates, train

from verl_ext.files import Table

RESULTS = Path(__file__).with_name("estimators_compared.json")
SEEDS = range(20)
LABELS = {"length of wrong answers": "length of incorrect responses"}
"""How the tables show a measure whose stored name is another one."""

ONE_RIGHT = ((1, 0),) + ((0, 0),) * 7
STUDIES = {
    "drgrpo": Study(
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
        (Arm("grpo"), Arm("dgpo", "dgpo"), Arm("dgpo without DQW", "dgpo", {"dqw": False})),
        ("hardest third", "easiest third"),
        ONE_RIGHT,
    ),
    "hadw": Study(
        (Arm("grpo"), Arm("hadw", "hadw"), Arm("hadw, lambda_scale=1", "hadw", {"lambda_scale": 1.0})),
        ("hardest third", "easiest third"),
        ONE_RIGHT,
        rollouts=4,
    ),
    "gdpo": Study(
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


def compute(study: Study, condition: Condition) -> dict[str, Any]:
    """Train every arm with every seed."""
    rate, found = rates(study, condition), {}
    for arm in study.arms:
        runs = [train(World(study, seed), arm, rate[arm.label], condition) for seed in SEEDS]
        found[arm.label] = {name: [round(run[name], 7) for run in runs] for name in study.measures}
    return {"rates": rate, "values": found}


def table(study: Study, found: Mapping[str, Any]) -> str:
    """Return a row per condition, arm and measure: both values, their difference, and p of a paired t-test."""
    from scipy import stats

    base, *others = (arm.label for arm in study.arms)
    rows: Table = [("learning", "estimator", "measure", f"with {base}", "with the estimator", "difference", "p")]
    for condition, one in found.items():
        for label in others:
            for name in study.measures:
                before, after = (np.array(one["values"][arm][name]) for arm in (base, label))
                p = stats.ttest_rel(after, before).pvalue
                form = ".1f" if name.startswith("length") else ".3f"
                cells = [f"{x.mean():{form}} ± {x.std(ddof=1):{form}}" for x in (before, after)]
                gap = f"{(after - before).mean():+{form}} ± {(after - before).std(ddof=1):{form}}"
                # A tiny p has no meaning beyond its limit, because the differences are not exactly normal.
                rows.append(
                    (condition, label, LABELS.get(name, name), *cells, gap, f"{p:.2g}" if p >= 1e-6 else "< 1e-6")
                )
    return markdown(rows)


def main() -> None:
    results = {
        key: {name: compute(study, condition) for name, condition in CONDITIONS.items()}
        for key, study in STUDIES.items()
    }
    RESULTS.write_text(json.dumps(results) + "\n", encoding="utf-8")
    for key, study in STUDIES.items():
        print(f"\n{key}\n\n{table(study, results[key])}")


if __name__ == "__main__":
    main()
