"""What people and programs write by mistake, and what they write on purpose.

Hypothesis chooses seeds, Python's generator the rest: ten thousand trees take seconds instead of minutes.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from verl_ext.estimators.compose import STEPS
from verl_ext.registry import BUILT_IN
from verl_ext.settings import VERL_NAMES, sections

SECTIONS = sections()

many = settings(max_examples=max(200, settings().max_examples))
"""For a property that costs little: more cases than the profile's, where that is a quick one."""

Draw = random.Random
draws = st.integers(0, 2**64 - 1).map(Draw)

NAMES = (
    "correctness",
    "format",
    "score",
    "acc",
    "",
    " ",
    "a.b",
    "a/b",
    "../../etc/passwd",
    "..",
    "/",
    "~",
    "ключ",
    "日本語",
    "🙂",
    "é",
    "e\u0301",
    "a\x00b",
    "\ud800",
    "a\nb",
    "__class__",
    "__import__('os').system('true')",
    "token_level_scores_x",
    "uid",
    "None",
    "on",
    "${oc.env:HOME}",
)
INTERPOLATIONS = (
    "${",
    "${}",
    "${nothing}",
    "${algorithm}",
    "${algorithm.gdpo}",
    "${algorithm.gdpo.whiten}",
    "${.epsilon}",
    "${..gdpo}",
    "${oc.env:HOME}",
    "${oc.env:SURELY_NOT_SET_ANYWHERE}",
    "${oc.env:SURELY_NOT_SET_ANYWHERE,null}",
    "${no_such_resolver:1}",
    "a${b",
    "???",
    "\\${x}",
    "${algorithm.x.${algorithm.y}}",
)
NUMBERS = (
    *(-3, -1, 0, 1, 2, 10, 10**400, -(10**400), 2**63),
    *(0.0, -0.0, 0.5, 1.0, 1e-6, 5e-324, 1e-320, 1e300, -1e300, 1e31, float("nan"), float("inf"), float("-inf")),
)
# Values that a setting may have, among which the rubbish stands.
VALID: dict[str, tuple[Any, ...]] = {
    "keys": (["correctness", "format"], ["score"], ["a/b", "../x"]),
    "weights": ([1.0, 0.5], [1], [0, 0], [1e30, -1e30]),
    "whiten": ("auto", "sequence", "token", "none"),
    "scale": ("std", "mad", "none"),
    "conditions": (
        {"format": {"on": "correctness", "at_least": 1.0}},
        {"format": {True: "correctness", "at_least": 1}},
    ),
    "balance": ("auto", "token", "sequence", "none"),
    "base": ("grpo", *sorted(set(BUILT_IN) - {"compose", "hadw"})),
    "anchor": ("soft", "window", "fixed"),
    "history_window": (1, 10),
    "fixed_anchor": (0.5,),
    "accuracy_key": ("acc", "correctness"),
    "dump_dir": ("/tmp/x",),
}
CLASSES = ("os:path", "os:system", "builtins:eval", "pickle:loads", ":", "x:", ":x", "..x:y", "a b:c", "os.path:join.x")
LISTS = (
    ["weigh_and_sum", "centre"],
    ["centre", "scale_by_std", "weigh_and_sum", "whiten"],
    ["weigh_and_sum", "centre", "scale_by_mad", "balance", "weigh_by_difficulty", "weigh_by_history"],
)
_OF_STEPS = sorted({item.name for kind in STEPS.values() for item in dataclasses.fields(kind)})


def name(draw: Draw) -> str:
    """A name, of a reward or of anything."""
    if draw.random() < 0.7:
        return draw.choice(NAMES)
    return "".join(
        chr(draw.choice((draw.randrange(32, 127), draw.randrange(0x110000)))) for _ in range(draw.randrange(5))
    )


def scalar(draw: Draw) -> Any:
    """One value."""
    kind = draw.randrange(6)
    if kind < 3:
        return (name(draw), draw.choice(INTERPOLATIONS), draw.choice(NUMBERS))[kind]
    return (None, draw.random() < 0.5, draw.randbytes(draw.randrange(3)))[kind - 3]


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


def value(draw: Draw, setting: str) -> Any:
    """What may stand at a setting: two of three times something that could be meant."""
    if setting == "steps" and draw.random() < 0.8:
        return steps(draw)
    if draw.random() < 0.67:
        return draw.choice(VALID.get(setting, (True, False, 1.0, 0.5, 2)))
    return draw.choice((scalar, tree))(draw)


def steps(draw: Draw) -> list[Any]:
    """A list of steps, about half of which are."""
    found: list[Any] = list(draw.choice((*LISTS, [])))
    for _ in range(draw.randrange(3)):
        step = draw.choice((draw.choice(sorted(STEPS)), name(draw), draw.choice(CLASSES)))
        given = {draw.choice((draw.choice(_OF_STEPS), name(draw))): tree(draw, 2) for _ in range(draw.randrange(3))}
        item = draw.choice((step, {"step": step, **given}, given, tree(draw)))
        found.insert(draw.randrange(len(found) + 1), item)
    return found


def section(draw: Draw) -> dict[Any, Any]:
    """An `algorithm` section, some of which is as it should be."""
    found: dict[Any, Any] = {}
    for part in draw.sample(sorted(SECTIONS), draw.randrange(4)):
        if draw.random() < 0.15:
            found[part] = tree(draw)
            continue
        fields = [item.name for item in dataclasses.fields(SECTIONS[part])]
        chosen = draw.sample(fields, min(len(fields), draw.randrange(1, 4)))
        found[part] = {field: value(draw, field) for field in chosen}
        if draw.random() < 0.15:
            found[part][name(draw)] = scalar(draw)
    for setting in ("norm_adv_by_std_in_grpo", "use_kl_in_reward"):
        if draw.random() < 0.25:
            found[setting] = draw.choice((True, False, tree(draw)))
    for ours, theirs in VERL_NAMES.items():
        if draw.random() < 0.2:
            found[theirs] = value(draw, ours)
    if draw.random() < 0.4:
        found[name(draw)] = tree(draw)
    return found


def sometimes(draw: Draw, chance: float, make: Callable[[Draw], Any], otherwise: Any) -> Any:
    """`make(draw)` now and then."""
    return make(draw) if draw.random() < chance else otherwise
