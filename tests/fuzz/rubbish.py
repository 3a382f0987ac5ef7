"""What programs hand over by mistake: odd names, numbers, and trees of both.

Hypothesis chooses seeds, Python's generator the rest: ten thousand trees take seconds instead of minutes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

many = settings(max_examples=max(200, settings().max_examples))
"""For a property that costs little: more cases than the profile's, where that is a quick one."""

Draw = random.Random
draws = st.integers(0, 2**64 - 1).map(Draw)

NAMES = (
    *("correctness", "format", "score", "acc", "uid", "None", "on", "token_level_scores_x", "__class__"),
    *("", " ", "a.b", "a/b", "../../etc/passwd", "..", "/", "~", "${oc.env:HOME}"),
    *("ключ", "日本語", "🙂", "é", "e\u0301", "a\x00b", "\ud800", "a\nb"),
)
NUMBERS = (
    *(-3, -1, 0, 1, 2, 10, 2**63),
    *(0.0, -0.0, 0.5, 1.0, 1e-6, 5e-324, 1e-320, 1e300, -1e300, 1e31, float("nan"), float("inf"), float("-inf")),
)


def name(draw: Draw) -> str:
    """A name, of a reward or of anything."""
    if draw.random() < 0.7:
        return draw.choice(NAMES)
    return "".join(
        chr(draw.choice((draw.randrange(32, 127), draw.randrange(0x110000)))) for _ in range(draw.randrange(5))
    )


def scalar(draw: Draw) -> Any:
    """One value."""
    given = (None, draw.random() < 0.5, draw.randbytes(draw.randrange(3)), name(draw), draw.choice(NUMBERS))
    return draw.choice(given)


def tree(draw: Draw, depth: int = 3) -> Any:
    """Nested lists and mappings of anything."""
    kind = draw.randrange(3) if depth else 0
    if kind == 0:
        return scalar(draw)
    inner = [tree(draw, depth - 1) for _ in range(draw.randrange(4))]
    if kind == 1:
        return inner
    keys = [draw.choice((name(draw), draw.randrange(-1, 2), True, "step", "on", 0.5)) for _ in inner]
    return dict(zip(keys, inner, strict=True))


def sometimes(draw: Draw, chance: float, make: Callable[[Draw], Any], otherwise: Any) -> Any:
    """`make(draw)` now and then."""
    return make(draw) if draw.random() < chance else otherwise
