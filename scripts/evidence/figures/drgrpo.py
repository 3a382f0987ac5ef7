"""Dr. GRPO: how much a token counts, by the length of its response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from figures.common import advantages, lines, panel, right_or_wrong
from verl_ext.core.groups import Array

SIZE = 8  # responses of a group
GROUPS, MICRO, USUAL, LIMIT = 8, 4, 500, 2048
LENGTHS = (50, 100, 200, 300, 400, 500, 600, 800, 1000, 1400, 2000)
NAMES = {
    "length": "the response's length",
    "longest": "the longest of the micro-batch",
    "micro": "the micro-batch's tokens",
    "group": "the group's tokens",
    "batch": "the mini-batch's tokens",
    "constant": "a constant, or nothing",
}
"""What a response's summed token losses are divided by: the rows of docs/pages/losses.md."""
ALT = "The weight of a token against the length of its response for six normalisers of the loss"


def token_weights(lengths: Sequence[int], groups: int, micro_batches: int, limit: int) -> dict[str, Array]:
    """By what each token's loss is multiplied, `[responses]`, for groups and micro-batches of equal size in order.

    >>> found = token_weights([3, 1, 2, 2], groups=2, micro_batches=2, limit=10)
    >>> found["length"] * 12, found["group"] * 8
    (array([1. , 3. , 1.5, 1.5]), array([1., 1., 1., 1.]))
    """
    tokens = np.array(lengths, dtype=np.float64)
    count = len(tokens)
    each = np.ones(count)

    def parts(number: int, reduce: Any) -> Array:
        found: Array = np.repeat(reduce(tokens.reshape(number, -1), axis=1), count // number)
        return found

    return {
        "length": 1 / (count * tokens),
        "longest": 1 / (count * parts(micro_batches, np.max)),
        "micro": 1 / (micro_batches * parts(micro_batches, np.sum)),
        "group": 1 / (groups * parts(groups, np.sum)),
        "batch": each / tokens.sum(),
        "constant": each / (count * limit),
        "nothing": each / count,
    }


def by_length(name: str) -> list[float]:
    """The weight of a token of one response of a batch, the others with 500 tokens: 1 where it has 500 too."""

    def weight(length: int) -> float:
        lengths = [length, *[USUAL] * (GROUPS * SIZE - 1)]
        return float(token_weights(lengths, GROUPS, GROUPS * SIZE // MICRO, LIMIT)[name][0])

    return [weight(length) / weight(USUAL) for length in LENGTHS]


def paragraph() -> str:
    def weight(name: str, length: int) -> str:
        return f"{by_length(name)[LENGTHS.index(length)]:.2f}"

    others = ", ".join(
        f"{weight(name, 2000)} ({what})"
        for name, what in {
            "longest": "`loss_scale_factor=null`, the longest of its micro-batch",
            "micro": "the micro-batch's tokens",
            "group": "the group's tokens",
            "batch": "the mini-batch's tokens",
        }.items()
    )
    right = advantages("grpo", right_or_wrong(SIZE))[:, 0] / advantages("drgrpo", right_or_wrong(SIZE))[:, 0]
    return (
        "The weight of one token by the length of its response, for the [normalisers](../losses.md) of the "
        f"loss; the other {GROUPS * SIZE - 1} responses of the mini-batch have {USUAL} tokens each, in groups of "
        f"{SIZE} and micro-batches of {MICRO}. Divided by the length of its response (`seq-mean-token-mean`), a token "
        f"counts {weight('length', 100)} times as much in a response of 100 tokens and {weight('length', 2000)} times "
        f"in one of 2,000. With a constant, or nothing, it counts {weight('constant', 2000)} in both. In between, for "
        f"2,000 tokens: {others}. The std does more: in a group of 8, `grpo` gives an answer the advantage of `drgrpo` "
        f"{right[0]:.2f} times at accuracy 1/8 and {right[3]:.2f} times at 1/2, so that hard and easy prompts count "
        "more against those in the middle. The paper describes both biases in words (section 3.1): longer wrong "
        "responses are penalised less, and questions that are too easy or too hard get higher weights."
    )


def draw(figure: Any) -> None:
    from matplotlib.ticker import NullLocator

    ax = figure.subplots()
    lines(ax, LENGTHS, {NAMES[name]: by_length(name) for name in NAMES})
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks((50, 100, 200, 500, 1000, 2000), ("50", "100", "200", "500", "1,000", "2,000"))
    ax.set_yticks((0.25, 0.5, 1, 2, 5, 10), ("0.25", "0.5", "1", "2", "5", "10"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_minor_locator(NullLocator())
    panel(ax, "a token's loss is divided by", "tokens of the response", "weight of a token, 1 at 500 tokens")
    ax.set_ylim(top=16)
