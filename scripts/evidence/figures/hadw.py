"""HA-DW: the bias of group-relative advantages, and what is left of it after the reweighting."""

from __future__ import annotations

from itertools import pairwise
from math import comb
from typing import Any, Literal

import numpy as np

from figures.common import advantages, lines, panel, right_or_wrong
from verl_ext.core.groups import Array
from verl_ext.tools.picture import COLOURS

ROLLOUTS = (4, 8, 16)
LAMBDAS = (1.0, 1.3, 1.5)
ANCHORS = (0.3, 0.5, 0.7)
SIZE, LAMBDA, ANCHOR = 8, 1.3, 0.5  # where one of them varies, the others are these
CHANCES = np.linspace(0.005, 0.995, 199)
Answers = Literal["all", "right", "wrong"]
ALT = (
    "Four panels against the chance of a right answer: the bias for 4, 8 and 16 rollouts; for 8 rollouts the bias "
    "after HA-DW for three values of lambda, for three anchors, and for right and wrong answers separately"
)


def before(size: int) -> Array:
    """Advantages `r - mean` of the groups that vary, `[right answers, answers]`."""
    return advantages("drgrpo", right_or_wrong(size))


def after(size: int, scale: float, anchor: float) -> Array:
    """The same, reweighted by HA-DW with this lambda and a fixed anchor."""
    section = {"base": "drgrpo", "anchor": "fixed", "fixed_anchor": anchor, "lambda_scale": scale}
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
    counted = {"all": np.ones_like(rewards), "right": rewards, "wrong": 1 - rewards}[answers]
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


def helped(scale: float, anchor: float, answers: Answers = "all") -> float:
    """The share of all p at which the bias is smaller after HA-DW than before."""
    old, new = bias(before(SIZE), answers=answers), bias(after(SIZE, scale, anchor), answers=answers)
    return float((np.abs(new) < np.abs(old) - 1e-12).mean())


def crossing(scale: float) -> float:
    """Below this p, and above 1 less it, HA-DW with the anchor 1/2 makes the bias over all answers smaller."""
    p = np.linspace(0.001, 0.499, 4981)
    worse = np.abs(bias(after(SIZE, scale, 0.5), p)) >= np.abs(bias(before(SIZE), p))
    return float(p[np.argmax(worse)])


def at(p: float, found: Array, answers: Answers = "all") -> float:
    return float(bias(found, np.array([p]), answers)[0])


def key_numbers() -> dict[str, float]:
    found: dict[str, float] = {}
    for size in ROLLOUTS:
        for p in (0.1, 0.25):
            found[f"{size} rollouts: bias at p = {p}"] = at(p, before(size))
    for scale in LAMBDAS:
        found[f"lambda {scale:g}: smaller bias up to p"] = crossing(scale)
    found["lambda 1.3: bias at p = 0.25"] = at(0.25, after(SIZE, 1.3, ANCHOR))
    found["right answers without HA-DW: bias at p = 0.1"] = at(0.1, before(SIZE), "right")
    for anchor in ANCHORS:
        found[f"anchor {anchor}: share of p with a smaller bias"] = helped(LAMBDA, anchor)
        found[f"anchor {anchor}: bias at p = 0.5"] = at(0.5, after(SIZE, LAMBDA, anchor))
    for scale in LAMBDAS:
        found[f"right answers, lambda {scale:g}: bias at p = 0.1"] = at(0.1, after(SIZE, scale, ANCHOR), "right")
        found[f"right answers, lambda {scale:g}: share of p with a smaller bias"] = helped(scale, ANCHOR, "right")
    found["8 rollouts: chance of A_hat < A, p up to 0.25"] = underrated(8, 0, 0.25)
    found["8 rollouts: chance of A_hat < A, p up to 0.5"] = underrated(8, 0, 0.5)
    return found


def paragraph(n: dict[str, float]) -> str:
    def biases(p: float) -> str:
        return ", ".join(f"{n[f'{size} rollouts: bias at p = {p}']:.3f}" for size in ROLLOUTS)

    def reach(scale: float) -> str:
        return f"{n[f'lambda {scale:g}: smaller bias up to p']:.2f}"

    def share(name: str) -> str:
        return f"{n[f'{name}: share of p with a smaller bias']:.0%}"

    items = [
        "The bias of `r - mean`: how far it is expected to be from `r - p`, p the chance of a right answer, in a group "
        "that varies (the binomial distribution summed up, no samples). It is negative below 1/2, 0 at 1/2 and "
        f"positive above: {biases(0.1)} at p = 0.1 and {biases(0.25)} at p = 0.25 with 4, 8 and 16 rollouts. This is "
        "lemma 2 of the paper, the formula of its figure 2. The chance that `r - mean` is too low, for 8 rollouts "
        f"{n['8 rollouts: chance of A_hat < A, p up to 0.25']:.4f} for p up to 0.25 and "
        f"{n['8 rollouts: chance of A_hat < A, p up to 0.5']:.4f} up to 0.5, equals the paper's tables 4 to 6 to 5e-6.",
        "After HA-DW with `base=drgrpo`, anchor 1/2, over all answers of a group: it helps on hard and on easy prompts "
        f"and overshoots between them. The bias is smaller for p below {reach(1.0)}, {reach(1.3)} and {reach(1.5)} "
        "with lambda 1, 1.3 and 1.5, and above 1 less these; at p = 0.25 lambda 1.3 turns "
        f"{n['8 rollouts: bias at p = 0.25']:.3f} into {n['lambda 1.3: bias at p = 0.25']:+.3f}.",
        f"Other anchors move p = 1/2, where there was no bias: {n['anchor 0.3: bias at p = 0.5']:+.3f} with 0.3, "
        f"{n['anchor 0.7: bias at p = 0.5']:+.3f} with 0.7.",
        "For one kind of answer it overshoots more: a right answer at p = 0.1 goes from "
        f"{n['right answers without HA-DW: bias at p = 0.1']:.3f} to "
        f"{n['right answers, lambda 1: bias at p = 0.1']:+.3f} with lambda 1 and "
        f"{n['right answers, lambda 1.3: bias at p = 0.1']:+.3f} with 1.3. Right answers have a smaller bias than "
        f"before on {share('right answers, lambda 1')} of all p with lambda 1, {share('right answers, lambda 1.3')} "
        f"with 1.3 and {share('right answers, lambda 1.5')} with 1.5. Theorem 3 of the paper promises less bias for a "
        "lambda that fits the answer and its prompt; none of these three fits all.",
    ]
    return "The four panels:\n\n" + "\n".join(f"- {item}" for item in items)


def draw(figure: Any) -> None:
    (first, by_lambda), (by_anchor, by_answer) = figure.subplots(2, 2)
    old, chance, unit = before(SIZE), "chance p of a right answer", "E[advantage - (r - p)]"
    lines(first, CHANCES, {f"{size} rollouts": bias(before(size)) for size in ROLLOUTS})
    panel(first, "r - mean, in a group that varies", chance, unit)
    scales = {f"lambda {scale:g}": bias(after(SIZE, scale, ANCHOR)) for scale in LAMBDAS}
    anchors = {f"anchor {anchor}": bias(after(SIZE, LAMBDA, anchor)) for anchor in ANCHORS}
    for ax, title, curves, top in (
        (by_lambda, f"{SIZE} rollouts, anchor {ANCHOR}, all answers", scales, 0.18),
        (by_anchor, f"{SIZE} rollouts, lambda {LAMBDA}, all answers", anchors, 0.27),
    ):
        lines(ax, CHANCES, curves)
        ax.plot(CHANCES, bias(old), color="#999999", linewidth=1, label="without HA-DW")
        panel(ax, title, chance, unit, loc="upper left", ncols=2)
        ax.set_ylim(top=top)
    kinds: tuple[Answers, Answers] = ("right", "wrong")
    for answers, colour in zip(kinds, COLOURS, strict=False):
        new = bias(after(SIZE, LAMBDA, ANCHOR), answers=answers)
        by_answer.plot(CHANCES, new, color=colour, linewidth=1.8, label=f"{answers} answers")
        label = f"{answers}, without HA-DW"
        by_answer.plot(CHANCES, bias(old, answers=answers), color=colour, linewidth=1, linestyle=":", label=label)
    panel(by_answer, f"{SIZE} rollouts, lambda {LAMBDA}, anchor {ANCHOR}", chance, unit)
    for ax in figure.axes:
        ax.axhline(0, color="#000000", linewidth=0.6)
