"""HA-DW: the bias of group-relative advantages, and what is left of it after the reweighting."""

from __future__ import annotations

from itertools import pairwise
from math import comb
from typing import Any, Literal

import numpy as np

from figures.common import advantages, lines, panel, right_or_wrong
from verl_ext.core.groups import Array

ROLLOUTS = (4, 8, 16)
LAMBDAS = (1.0, 1.3, 1.5)
SIZE, ANCHOR = 8, 0.5
CHANCES = np.linspace(0.005, 0.995, 199)
Answers = Literal["all", "right"]
ALT = (
    "Two panels against the chance of a right answer: the bias for 4, 8 and 16 rollouts, and for 8 rollouts the bias "
    "after HA-DW for three values of lambda"
)


def before(size: int) -> Array:
    """Advantages `r - mean` of the groups that vary, `[right answers, answers]`."""
    return advantages("drgrpo", right_or_wrong(size))


def after(size: int, scale: float) -> Array:
    """The same, reweighted by HA-DW with this lambda and a fixed anchor."""
    section = {"base": "drgrpo", "anchor": "fixed", "fixed_anchor": ANCHOR, "lambda_scale": scale}
    return advantages("hadw", right_or_wrong(size), {"hadw": section})


def chance_of_each(size: int, p: Array) -> Array:
    """The binomial chance of 1 to size - 1 right answers, given that the group varies: `[p, right answers]`."""
    right = np.arange(1, size)
    ways = np.array([comb(size, int(k)) for k in right], dtype=np.float64)
    odds = ways * p[:, None] ** right * (1 - p[:, None]) ** (size - right)
    share: Array = odds / odds.sum(axis=1, keepdims=True)
    return share


def bias(found: Array, p: Array = CHANCES, answers: Answers = "all") -> Array:
    """`E[A_hat - A]` of an answer of a group that varies, where `A = r - p` and p is the chance of a right answer."""
    size = found.shape[1]
    rewards = right_or_wrong(size)[:, :, 0]
    counted = rewards if answers == "right" else np.ones_like(rewards)
    error = found - (rewards - p[:, None, None])
    chance = chance_of_each(size, p)
    return np.einsum("pg,pgi,gi->p", chance, error, counted) / np.einsum("pg,gi->p", chance, counted)


def underrated(size: int, low: float, high: float) -> float:
    """The chance that `A_hat < A` in a group that varies, p uniform from low to high (the paper's tables 4 to 6).

    It is smooth between multiples of 1/size, where Gauss and Legendre's rule is exact to rounding.
    """
    edges = np.unique(np.clip([low, *np.arange(1, size) / size, high], low, high))
    nodes, shares = np.polynomial.legendre.leggauss(40)
    baseline = 1 - before(size)[:, 0]  # of a right answer, A_hat = 1 - p_hat
    area = 0.0
    for start, end in pairwise(edges):
        p = (start + end) / 2 + nodes * (end - start) / 2
        area += float(shares @ (chance_of_each(size, p) * (baseline > p[:, None])).sum(axis=1)) * (end - start) / 2
    return area / (high - low)


def crossing(scale: float) -> float:
    """Below this p, and above 1 less it, HA-DW with the anchor 1/2 makes the bias over all answers smaller."""
    p = np.linspace(0.001, 0.499, 4981)
    worse = np.abs(bias(after(SIZE, scale), p)) >= np.abs(bias(before(SIZE), p))
    return float(p[np.argmax(worse)])


def paragraph() -> str:
    def at(p: float, found: Array, answers: Answers = "all") -> str:
        return f"{bias(found, np.array([p]), answers)[0]:.3f}"

    def biases(p: float) -> str:
        return ", ".join(at(p, before(size)) for size in ROLLOUTS)

    low, middle, high = (f"{crossing(scale):.2f}" for scale in LAMBDAS)
    items = [
        "The bias of `r - mean`: how far it is expected to be from `r - p`, p the chance of a right answer, in a group "
        "that varies (the binomial distribution summed up, no samples). It is negative below 1/2, 0 at 1/2 and "
        f"positive above: {biases(0.1)} at p = 0.1 and {biases(0.25)} at p = 0.25 with 4, 8 and 16 rollouts. This is "
        "lemma 2 of the paper, the formula of its figure 2. The chance that `r - mean` is too low, for 8 rollouts "
        f"{underrated(8, 0, 0.25):.4f} for p up to 0.25 and {underrated(8, 0, 0.5):.4f} up to 0.5, equals the paper's "
        "tables 4 to 6 to 5e-6.",
        "After HA-DW with `base=drgrpo`, anchor 1/2, over all answers of a group: it helps on hard and on easy prompts "
        f"and overshoots between them. The bias is smaller for p below {low}, {middle} and {high} "
        "with lambda 1, 1.3 and 1.5, and above 1 less these; at p = 0.25 lambda 1.3 turns "
        f"{at(0.25, before(SIZE))} into {at(0.25, after(SIZE, 1.3))}. For one kind of answer it overshoots more: a "
        f"right answer at p = 0.1 goes from {at(0.1, before(SIZE), 'right')} to {at(0.1, after(SIZE, 1.3), 'right')} "
        "with lambda 1.3. Theorem 3 of the paper promises less bias for a lambda that fits the answer and its prompt; "
        "none of these three fits all.",
    ]
    return "The two panels:\n\n" + "\n".join(f"- {item}" for item in items)


def draw(figure: Any) -> None:
    first, second = figure.subplots(1, 2)
    lines(first, CHANCES, {f"{size} rollouts": bias(before(size)) for size in ROLLOUTS})
    panel(first, "r - mean, in a group that varies", "chance p of a right answer", "E[advantage - (r - p)]")
    lines(second, CHANCES, {f"lambda {scale:g}": bias(after(SIZE, scale)) for scale in LAMBDAS})
    second.plot(CHANCES, bias(before(SIZE)), color="#999999", linewidth=1, label="without HA-DW")
    panel(second, f"{SIZE} rollouts, anchor {ANCHOR}", "chance p of a right answer", "E[advantage - (r - p)]")
    for ax in (first, second):
        ax.axhline(0, color="#000000", linewidth=0.6)
