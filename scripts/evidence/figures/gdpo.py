"""GDPO: how many groups of rewards an estimator can tell apart, and what a wrong answer earns by its format."""

from __future__ import annotations

import itertools
from math import comb
from typing import Any

import numpy as np

from figures.common import WITHOUT_STD, advantages, lines, panel
from verl_ext.core.groups import Array

# GDPO's whitening of the batch comes last and is the same function of every value, so it changes no count and no sign.
GDPO = {"gdpo": {"whiten": "none"}}
ESTIMATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "grpo without std": ("grpo", WITHOUT_STD),
    "gdpo": ("gdpo", GDPO),
}
ROLLOUTS = range(2, 17)
DECIMALS = 4  # the 1e-6 that grpo adds to the std makes a difference from the fifth on
ONE, BOTH = [[1.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]]

SIZE, HONEST = 8, 0.6
RIGHT, WRONG = 3.0, -3.0
KEYS = ["reward 0", "reward 1"]
CONDITION = {"reward 1": {"on": "reward 0", "at_least": RIGHT}}
HACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "gdpo": ("gdpo", GDPO),
    "gdpo, format weighs 1/2": ("gdpo", {**GDPO, "rewards": {"keys": KEYS, "weights": [1.0, 0.5]}}),
    "gdpo, format conditioned": ("gdpo", {**GDPO, "rewards": {"keys": KEYS, "conditions": CONDITION}}),
}
SOLVED = np.linspace(0, 1, 1001)
ALT = (
    "Two panels: the number of distinct advantages of a group against its rollouts for grpo, grpo without std and "
    "gdpo; and what a wrong answer in perfect format earns against the chance that another answer is right"
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


def better(name: str) -> str:
    """The advantage of a rollout with one of two rewards, and of one with both, beside a rollout with none."""
    estimator, algorithm = ESTIMATORS[name]
    one, both = advantages(estimator, np.array([ONE, BOTH]), algorithm)[:, 0]
    return f"{one:.4f} and {both:.4f}"


def hacked(name: str, solved: Array = SOLVED) -> Array:
    """The expected advantage of a wrong answer in format, by the chance that one of the 7 others is right.

    Right or wrong, the others are in format with the chance HONEST. All groups are summed up; nothing is drawn.
    """
    estimator, algorithm = HACKED[name]
    others = SIZE - 1
    cases = [(right, k, j) for right in range(SIZE) for k in range(right + 1) for j in range(SIZE - right)]
    groups = np.array(
        [
            [[WRONG, 1.0]]
            + [[RIGHT, float(at < k)] for at in range(right)]
            + [[WRONG, float(at < j)] for at in range(others - right)]
            for right, k, j in cases
        ]
    )
    first = advantages(estimator, groups, algorithm)[:, 0]
    formed = [
        comb(right, k) * comb(others - right, j) * HONEST ** (k + j) * (1 - HONEST) ** (others - k - j)
        for right, k, j in cases
    ]
    chance = [comb(others, right) * solved**right * (1 - solved) ** (others - right) for right, _, _ in cases]
    found: Array = (first * formed) @ np.array(chance)
    return found


def paragraph() -> str:
    def counts(rollouts: int, rewards: int) -> str:
        return ", ".join(str(distinct(name, rollouts, rewards)) for name in ESTIMATORS)

    def earned(name: str) -> str:
        return ", ".join(f"{value:+.2f}" for value in hacked(name, np.array([0, 1 / 8, 1 / 4, 1 / 2])))

    def until(name: str) -> str:
        return f"{SOLVED[np.argmax(hacked(name) <= 0)]:.0%}"

    counted = (
        f"Left, how many different advantages a group of 0/1 rewards can have, its order ignored, to {DECIMALS} "
        f"decimals. `grpo`, `grpo` without std and `gdpo` tell {counts(8, 2)} groups apart with 2 rewards and 8 "
        f"rollouts, {counts(16, 2)} with 16 rollouts, and {counts(4, 6)} with 6 rewards and 4 rollouts. Of two "
        "rollouts, one without any reward, the other one has, with one of two rewards or with both, the advantage "
        f"{better('grpo')} under `grpo`, {better('grpo without std')} without std, {better('gdpo')} under `gdpo` "
        "before whitening. The paper has these same six values (sections 2 and 3.1), and counts groups in its figure "
        "3. The authors' project page has a picture of these counts for `grpo` and `gdpo`: 31 of the 35 points in our "
        "range can be read off, and all equal our counts to the accuracy of the reading, 2 counts. The other four "
        "overlap."
    )
    hack = (
        "Right, **what a hack earns**: the expected advantage, before whitening, of a wrong answer in perfect format, "
        f"in a group of {SIZE} with correctness -3 or 3 and format 0 or 1, where the others have the format in "
        f"{HONEST:.0%}. If another answer is right with a chance of 0, 1/8, 1/4, 1/2, it earns {earned('grpo')} under "
        f"`grpo` on the sum, and {earned('gdpo')} under `gdpo`. So `gdpo` pays for the form alone where less than "
        f"{until('gdpo')} of the answers are right, `grpo` below {until('grpo')}. Two cures:"
    )
    conditions = (
        "- `'algorithm.rewards.conditions={format:{on:correctness,at_least:3}}'` counts the format of right answers "
        f"only: it earns {earned('gdpo, format conditioned')}. But a prompt that is never solved then teaches no "
        "format."
    )
    weights = (
        "- `'algorithm.rewards.weights=[1,0.5]'` lets format count half as much: it earns "
        f"{earned('gdpo, format weighs 1/2')}, which is positive below {until('gdpo, format weighs 1/2')}."
    )
    return "\n".join([counted, "", hack, "", conditions, weights])


def draw(figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    lines(left, ROLLOUTS, {name: [distinct(name, n, 2) for n in ROLLOUTS] for name in ESTIMATORS}, marker="o")
    panel(left, "2 rewards", "rollouts of a group", "distinct advantages of a group")
    lines(right, SOLVED, {name: hacked(name) for name in HACKED})
    right.axhline(0, color="#000000", linewidth=0.6)
    panel(right, "a wrong answer in perfect format", "chance that another answer is right", "its expected advantage")
