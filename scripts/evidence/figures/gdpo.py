"""GDPO: how many groups of rewards an estimator can tell apart."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from figures.common import WITHOUT_STD, advantages, lines, panel
from verl_ext.core.groups import Array

# GDPO's whitening of the batch comes last and is the same function of every value, so it changes no count.
ESTIMATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "grpo without std": ("grpo", WITHOUT_STD),
    "gdpo": ("gdpo", {"gdpo": {"whiten": "none"}}),
}
ROLLOUTS = range(2, 17)
REWARDS = range(2, 7)
DECIMALS = 4  # epsilon, 1e-6, added to each std makes a difference from the fifth on
ONE, BOTH = [[1.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]]
CASES = {"one": "one of two rewards", "both": "both rewards"}
SHADES = {"one": "#999999", "both": "#333333"}
ALT = (
    "Three panels: the number of distinct advantages of a group against rollouts and against rewards, and the "
    "advantage of the better rollout in two groups, for grpo, grpo without std and gdpo"
)


def groups_of(rollouts: int, rewards: int) -> Array:
    """All groups of 0/1 rewards `[groups, rollouts, rewards]`, without those that differ in an order only.

    A group is a multiset of rollouts, or of rewards, which have equal weights: whichever is fewer.

    >>> groups_of(2, 2).shape  # of 4 kinds of rollouts two: 4 * 5 / 2
    (10, 2, 2)
    """
    if 2**rewards <= 2**rollouts:
        return np.array(_multisets(rewards, rollouts))
    return np.array(_multisets(rollouts, rewards)).transpose(0, 2, 1)


def _multisets(bits: int, size: int) -> list[tuple[tuple[float, ...], ...]]:
    return list(itertools.combinations_with_replacement(itertools.product((0.0, 1.0), repeat=bits), size))


def distinct(name: str, rollouts: int, rewards: int) -> int:
    """How many different advantages the groups have, order ignored.

    >>> distinct("grpo", 2, 2), distinct("grpo without std", 2, 2), distinct("gdpo", 2, 2)
    (2, 3, 3)
    """
    estimator, algorithm = ESTIMATORS[name]
    found = np.sort(advantages(estimator, groups_of(rollouts, rewards), algorithm), axis=1)
    return len(np.unique(found.round(DECIMALS) + 0.0, axis=0))


def better(name: str) -> tuple[float, float]:
    """The advantage of a rollout with one of two rewards, and of one with both, beside a rollout with none."""
    estimator, algorithm = ESTIMATORS[name]
    one, both = advantages(estimator, np.array([ONE, BOTH]), algorithm)[:, 0]
    return float(one), float(both)


def key_numbers() -> dict[str, float]:
    found: dict[str, float] = {}
    for name in ESTIMATORS:
        found[f"{name}: 2 rewards, 8 rollouts"] = distinct(name, 8, 2)
        found[f"{name}: 2 rewards, 16 rollouts"] = distinct(name, 16, 2)
        found[f"{name}: 6 rewards, 4 rollouts"] = distinct(name, 4, 6)
        found[f"{name}: one of two rewards"], found[f"{name}: both rewards"] = better(name)
    return found


def paragraph(n: dict[str, float]) -> str:
    def counts(case: str) -> str:
        return ", ".join(f"{n[f'{name}: {case}']:.0f}" for name in ESTIMATORS)

    def pair(name: str) -> str:
        return f"{n[f'{name}: one of two rewards']:.4f} and {n[f'{name}: both rewards']:.4f}"

    return (
        f"How many different advantages a group of 0/1 rewards can have, its order ignored, to {DECIMALS} decimals. "
        f"`grpo`, `grpo` without std and `gdpo` tell {counts('2 rewards, 8 rollouts')} groups apart with 2 rewards and "
        f"8 rollouts, {counts('2 rewards, 16 rollouts')} with 16 rollouts, and {counts('6 rewards, 4 rollouts')} with "
        "6 rewards and 4 rollouts. The last panel has two rollouts, one without any reward: the other one, with one of "
        f"two rewards or with both, has the advantage {pair('grpo')} under `grpo`, {pair('grpo without std')} without "
        f"std, {pair('gdpo')} under `gdpo` before whitening. The paper has these same six values (sections 2 and 3.1), "
        "and counts groups in its figure 3. The authors' project page has a picture of these counts for `grpo` and "
        "`gdpo`: 31 of the 35 points in our range can be read off, and all equal our counts to the accuracy of the "
        "reading, 2 counts. The other four overlap."
    )


def draw(figure: Any) -> None:
    axes = figure.subplot_mosaic([["rollouts", "rewards"], ["example", "example"]], height_ratios=[3, 2])
    look = {"marker": "o"}
    lines(axes["rollouts"], ROLLOUTS, {name: [distinct(name, n, 2) for n in ROLLOUTS] for name in ESTIMATORS}, **look)
    lines(axes["rewards"], REWARDS, {name: [distinct(name, 4, k) for k in REWARDS] for name in ESTIMATORS}, **look)
    axes["rewards"].set_xticks(REWARDS)
    panel(axes["rollouts"], "2 rewards", "rollouts of a group", "distinct advantages of a group")
    panel(axes["rewards"], "4 rollouts", "rewards", "distinct advantages of a group")
    names = list(ESTIMATORS)
    for shift, case, values in zip((-0.2, 0.2), ("one", "both"), zip(*map(better, names), strict=True), strict=True):
        bars = axes["example"].bar(np.arange(len(names)) + shift, values, 0.36, label=CASES[case], color=SHADES[case])
        axes["example"].bar_label(bars, fmt="%.4f", fontsize=9)
    axes["example"].set_xticks(range(len(names)), names)
    axes["example"].margins(y=0.2)
    panel(axes["example"], "2 rollouts, one without a reward; the other one has", "", "its advantage")
