"""DGPO: how far a group moves the policy, by its accuracy, and the weights of its difficulty."""

from __future__ import annotations

from typing import Any

import numpy as np

from figures.common import advantages, lines, panel, right_or_wrong
from verl_ext.core.groups import Array

SIZE = 8
ACCURACY = np.arange(1, SIZE) / SIZE
TEMPERATURES = (1.0, 2.0, 5.0, 10.0)  # the paper's ablation
ALT = (
    "Two panels: the sum of the absolute advantages of a group of 8 against its accuracy for grpo, drgrpo and dgpo, "
    "and the weight of a group against its accuracy for four temperatures"
)


def total(estimator: str, algorithm: dict[str, Any] | None = None) -> Array:
    """`sum |A|` of groups of 8 with 1 to 7 right answers, one of each in the batch."""
    return np.abs(advantages(estimator, right_or_wrong(SIZE), algorithm)).sum(axis=1)


def unweighted() -> Array:
    """`sum |A|` under DGAE alone."""
    return total("dgpo", {"dgpo": {"dqw": False, "balance": "none"}})


def weights(temperature: float) -> Array:
    """The weights that DQW gives these groups."""
    return total("dgpo", {"dgpo": {"dqw_temp": temperature, "balance": "none"}}) / unweighted()


def paragraph() -> str:
    def pair(sums: Array) -> str:
        return f"{sums[0]:.2f} to {sums[SIZE // 2 - 1]:.2f}"

    def ends(temperature: float) -> str:
        found = weights(temperature)
        return f"T={temperature:g}: {found[0]:.2f} and {found[-1]:.2f}, ratio {found[0] / found[-1]:.2f}"

    return (
        "Left, what all responses of a group of 8 add up to, by its accuracy. From accuracy 1/8 to 1/2, `sum |A|` "
        f"rises from {pair(total('grpo'))} under `grpo` and from {pair(total('drgrpo'))} under `drgrpo`. Under `dgpo`, "
        f"before DQW, it is {unweighted()[0]:.2f} everywhere: a hard prompt counts as much as any "
        "other. Theorem 1 of the paper has `2 G sqrt(p (1 - p))` for `grpo`, with a std over n. verl's std has n - 1, "
        f"which makes it `sqrt((G - 1) / G)` = {((SIZE - 1) / SIZE) ** 0.5:.3f} of that at every accuracy. Theorem 2 "
        "has G for `dgpo`, as here up to the epsilon. Right, the weights of DQW in a batch with one group of each "
        f"accuracy; hardest and easiest are {'; '.join(map(ends, TEMPERATURES))}. The paper bounds the ratio for T=2 "
        f"by `exp(1/2)` = {np.exp(0.5):.2f}. A group of 8 that varies has an accuracy from 1/8 to 7/8, so that the "
        f"ratio here is at most `exp(3/8)` = {np.exp(3 / 8):.2f}."
    )


def draw(figure: Any) -> None:
    left, right = figure.subplots(1, 2)
    p = np.linspace(0, 1, 201)
    left.plot(p, 2 * SIZE * np.sqrt(p * (1 - p)), color="#999999", linewidth=1, label="2 G sqrt(p (1 - p)), the paper")
    lines(
        left,
        ACCURACY,
        {"grpo, verl's std": total("grpo"), "dgpo without dqw": unweighted(), "drgrpo": total("drgrpo")},
        marker="o",
    )
    panel(left, "a group of 8", "accuracy of the group", "sum of |advantage|")
    left.set_ylim(0, 12.5)
    lines(right, ACCURACY, {f"T = {t:g}": weights(t) for t in TEMPERATURES}, marker="o")
    panel(right, "DQW: one group of each accuracy", "accuracy of the group", "weight of the group")
