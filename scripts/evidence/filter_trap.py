"""Dynamic sampling by variance and by accuracy, on simulated policies where half of the prompts are hopeless.

    python scripts/evidence/filter_trap.py      # two minutes: the table of docs/pages/dynamic_sampling.md

The model is that of docs/pages/estimators_compared.md: 60 prompts, 8 answers to each, gdpo on correctness (0 or 6) and
format (0 or 1), SGD. In every second prompt a right answer is 3,000 times less likely than there. A step trains on 20
groups; a filter draws more prompts until 20 groups have passed it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from markdown_table import markdown
from simulate_policies import SEEDS, STUDIES
from softmax_policies import BATCH, PROMPTS, STEPS, Arm, Condition, Learner, World, rates

from verl_ext.tools.tables import Table

HOPELESS = np.arange(PROMPTS) % 2 == 1
DROP = 8.0
"""Logits by which a right answer to a hopeless prompt is less likely."""
STUDY = STUDIES["gdpo"]
Keep = Callable[[np.ndarray, np.ndarray], bool]
"""From whether each answer of a group is right, and in format, to whether the group is trained on."""
FILTERS: dict[str, Keep] = {
    "none": lambda _right, _formatted: True,
    "`any_reward`": lambda right, formatted: bool(np.ptp(right) or np.ptp(formatted)),
    "`accuracy_between`": lambda right, _formatted: bool(0.05 <= right.mean() <= 0.95),
}


def train(seed: int, keep: Keep, rate: float) -> dict[str, float]:
    """Train once; return the accuracy and the format at the end, and what was drawn and trained on."""
    world, draw = World(STUDY, seed), np.random.default_rng(seed)
    world.initial = world.initial - DROP * np.outer(HOPELESS, world.right)
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
    trained = learner.policy.probabilities()
    return {
        "accuracy where there is hope": (trained @ world.right)[~HOPELESS].mean(),
        "format": (trained @ world.formatted).mean(),
        "hopeless groups trained on": hopeless / (STEPS * BATCH),
        "groups drawn for one trained on": drawn / (STEPS * BATCH),
    }


def main() -> None:
    rate = rates(STUDY, Condition())["gdpo"]
    rows: Table = []
    for name, keep in FILTERS.items():
        runs = [train(seed, keep, rate) for seed in SEEDS]
        found = {measure: np.array([run[measure] for run in runs]) for measure in runs[0]}
        rows = rows or [("filter", *found)]
        rows.append((name, *(f"{x.mean():.3f} ± {x.std(ddof=1):.3f}" for x in found.values())))
    print(markdown(rows))


if __name__ == "__main__":
    main()
