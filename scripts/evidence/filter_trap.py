"""Dynamic sampling by variance and by accuracy, on simulated policies where half of the prompts are hopeless.

    python scripts/evidence/filter_trap.py      # two minutes: the table, and filter_trap.json

The model is that of docs/pages/estimators_compared.md: 60 prompts, 8 answers to each, gdpo on correctness (0 or 6) and
format (0 or 1), SGD, the rate of the unfiltered run for all. In every second prompt a right answer is 3,000 times less
likely than there. A step trains on 20 groups; a filter draws more prompts until 20 groups have passed it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from simulate_policies import STUDIES, compare
from softmax_policies import BATCH, PROMPTS, STEPS, Arm, Condition, Learner, World, rates

from verl_ext.tools.tables import Rows, markdown

SEEDS = range(20)
HOPELESS = np.arange(2 * PROMPTS) % 2 == 1
DROP = 8.0
"""Logits by which a right answer to a hopeless prompt is less likely."""
BOUNDS = (0.05, 0.95)
RESULTS = Path(__file__).with_suffix(".json")
STUDY = STUDIES["gdpo"]
Keep = Callable[[np.ndarray, np.ndarray], bool]
"""From whether each answer of a group is right, and in format, to whether the group is trained on."""


def everything(_right: np.ndarray, _formatted: np.ndarray) -> bool:
    return True


def any_reward(right: np.ndarray, formatted: np.ndarray) -> bool:
    return bool(np.ptp(right) or np.ptp(formatted))


def accuracy_between(right: np.ndarray, _formatted: np.ndarray) -> bool:
    return bool(BOUNDS[0] <= right.mean() <= BOUNDS[1])


FILTERS: Mapping[str, Keep] = {
    "no filter": everything,
    "any_reward": any_reward,
    "accuracy_between": accuracy_between,
}


def world_of(seed: int) -> World:
    """Return the policies of a seed, half of whose prompts are hopeless."""
    world = World(STUDY, seed)
    world.initial = world.initial - DROP * np.outer(HOPELESS, world.right)
    return world


def train(seed: int, keep: Keep, rate: float) -> dict[str, float]:
    """Train once; return the accuracies and the format at the end, and what was drawn and trained on."""
    world, draw = world_of(seed), np.random.default_rng(seed)
    learner = Learner(world, Arm("gdpo", "gdpo"))
    drawn = hopeless = 0
    for _ in range(STEPS):
        prompts, answers = [], []
        while len(prompts) < BATCH:
            prompt = int(draw.integers(PROMPTS))
            (policy,) = learner.policy.probabilities([prompt])
            rows = draw.choice(len(policy), STUDY.rollouts, p=policy)
            drawn += 1
            if keep(world.right[rows], world.formatted[rows]):
                prompts.append(prompt)
                answers.append(rows)
        hopeless += int(HOPELESS[prompts].sum())
        learner.policy.move(rate * learner.gradient_of(np.array(prompts), np.array(answers)))
    trained = learner.policy.probabilities()[:PROMPTS]
    accuracy = trained @ world.right
    return {
        "accuracy where there is hope": float(accuracy[~HOPELESS[:PROMPTS]].mean()),
        "format": float((trained @ world.formatted).mean()),
        "share of hopeless groups trained on": hopeless / (STEPS * BATCH),
        "groups drawn for one trained on": drawn / (STEPS * BATCH),
    }


def main() -> None:
    rate = rates(STUDY, Condition())["gdpo"]
    found = {name: [train(seed, keep, rate) for seed in SEEDS] for name, keep in FILTERS.items()}
    measures = list(found["no filter"][0])
    columns = {name: {m: np.array([run[m] for run in runs]) for m in measures} for name, runs in found.items()}
    rows: Rows = [("filter", *measures)]
    for name, values in columns.items():
        rows.append((name, *(f"{x.mean():.3f} ± {x.std(ddof=1):.3f}" for x in values.values())))
    print(markdown(rows))
    gaps = {name: compare(columns[name][measures[0]], columns["accuracy_between"][measures[0]]) for name in found}
    for name in ("no filter", "any_reward"):
        gap = gaps[name]
        print(f"accuracy_between against {name}: {gap['difference']:+.3f} ± {gap['spread']:.3f}, p {gap['p']:.2g}")
    runs = {name: {m: x.round(6).tolist() for m, x in values.items()} for name, values in columns.items()}
    RESULTS.write_text(json.dumps({"rate": rate, "runs": runs}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
