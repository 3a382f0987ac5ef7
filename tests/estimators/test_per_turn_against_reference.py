"""Each estimator on rewards by turn, against plain loops: uneven turns and groups, missing scores, a discount."""

import math
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.reference import NAN
from verl_ext import Batch, Settings, build
from verl_ext.core.turns import Turns

KEYS = ["tool", "right", "form"]
WEIGHTS = [1.0, 0.5, 2.0]
REWARDS = {"keys": KEYS, "weights": WEIGHTS, "accuracy_key": "right"}
VALUES = [0.0, 1.0, -1.0, 0.5]


@dataclass
class Session:
    """A response: its prompt, an entry of `tool` for each turn, the others once."""

    uid: str
    tool: list[float]
    right: float
    form: float
    lengths: list[int]
    accuracy: float


@st.composite
def sessions(draw: st.DrawFn, *, nan: bool = True) -> list[Session]:
    """Uneven groups in any order, of responses with one to four turns."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    missing = rng.choice([0.0, 0.1, 0.4]) if nan else 0.0

    def some(count: int) -> list[float]:
        return np.where(rng.random(count) < missing, NAN, rng.choice(VALUES, size=count)).tolist()

    found = []
    for group in rng.permutation(np.repeat(np.arange(len(sizes)), sizes)):
        turns = int(rng.choice([1, 1, 2, 3, 4]))
        right, form, (accuracy,) = *some(2), np.where(rng.random(1) < missing, NAN, rng.integers(0, 5, 1) / 4)
        lengths = rng.integers(0, 9, turns).tolist()
        found.append(Session(f"p{group}", some(turns), right, form, lengths, float(accuracy)))
    return found


@dataclass
class Rows:
    """The same by rows, in loops: one a turn."""

    prompts: list[str]
    labels: list[tuple[str, int]]
    last: list[bool]
    share: list[float]
    """1 by the number of turns of the response."""
    lengths: list[int]
    accuracy: list[float]
    columns: dict[str, list[float]]
    """The returns."""


def rows_of(batch: list[Session], discount: float, conditions: dict[str, tuple[str, float]] | None = None) -> Rows:
    out = Rows([], [], [], [], [], [], {key: [] for key in KEYS})
    for one in batch:
        count = len(one.tool)
        given_rewards = {"tool": one.tool, "right": [one.right] * count, "form": [one.form] * count}
        kept = reference.conditioned(given_rewards, conditions or {})
        for turn in range(count):
            out.prompts.append(one.uid)
            out.labels.append((one.uid, turn))
            out.last.append(turn == count - 1)
            out.share.append(1 / count)
            out.lengths.append(one.lengths[turn])
            out.accuracy.append(one.accuracy)
            out.columns["tool"].append(sum(discount ** (s - turn) * kept["tool"][s] for s in range(turn, count)))
            for key in ("right", "form"):
                out.columns[key].append(discount ** (count - 1 - turn) * kept[key][turn])
    return out


def batch_of(batch: list[Session], discount: float, **more: Any) -> Batch:
    turns = Turns.of_counts([len(one.tool) for one in batch], (0,), discount)
    rewards = [[entry, one.right, one.form] for one in batch for entry in one.tool]
    return Batch.of(
        rewards,
        [one.uid for one in batch for _ in one.tool],
        turns=turns,
        keys=KEYS,
        lengths=[length for one in batch for length in one.lengths],
        accuracy=[one.accuracy for one in batch for _ in one.tool],
        outputs=[float(turn == 0) for one in batch for turn in range(len(one.tool))],
        **more,
    )


def check(name: str, batch: list[Session], discount: float, config: dict[str, Any], wanted: list[float], state=None):
    settings = Settings.parse({"rewards": REWARDS} | config)
    conditions = settings.rewards.conditions
    found = build(name, settings)(batch_of(batch, discount, conditions=conditions), state)
    np.testing.assert_allclose(found.advantages, wanted, rtol=1e-8, atol=1e-8)
    return found


def total_of(rows: Rows) -> list[float]:
    return reference.weighted_total(list(rows.columns.values()), WEIGHTS)


DISCOUNT = st.sampled_from([1.0, 0.5])


@given(sessions(), DISCOUNT)
def test_drgrpo_and_grpo(batch, discount):
    rows = rows_of(batch, discount)
    check("drgrpo", batch, discount, {}, reference.drgrpo(total_of(rows), rows.labels))
    grpo = {"compose": {"steps": ["weighted_sum", "center", {"step": "scale_by_std", "epsilon": 1e-6}]}}
    check("compose", batch, discount, grpo, reference.grpo(total_of(rows), rows.labels))


def by_sequence(total: list[float], rows: Rows) -> list[float]:
    """Whitened so that each response counts once; groups are centered, so that nothing is subtracted."""
    counted = {}  # response to its scored rows; a response begins at turn 0
    response = -1
    for row, (_, turn) in enumerate(rows.labels):
        response += turn == 0
        if not math.isnan(total[row]):
            counted.setdefault(response, []).append(row)
    if len(counted) < 2:
        return [value / 1e-6 for value in total]
    squares = sum(statistics.fmean(total[row] ** 2 for row in mine) for mine in counted.values())
    return [value / (math.sqrt(squares / (len(counted) - 1)) + 1e-6) for value in total]


@given(
    sessions(),
    DISCOUNT,
    st.sampled_from(["sequence", "token", "none"]),
    st.sampled_from([{}, {"tool": ("right", 0.5)}, {"tool": ("right", 0.5), "form": ("right", 0.0)}]),
)
def test_gdpo_with_conditions_before_the_returns(batch, discount, whiten, conditions):
    rows = rows_of(batch, discount, conditions)
    if whiten == "token":
        wanted = reference.gdpo(rows.columns, rows.labels, rows.lengths, weights=WEIGHTS, whiten=whiten)
    else:
        scaled = [reference.over_std(column, rows.labels, 0.0) for column in rows.columns.values()]
        total = reference.weighted_total(scaled, WEIGHTS)
        reference.cancel(total, rows.labels)
        wanted = reference.learnt(total if whiten == "none" else by_sequence(total, rows))
    written = {easy: {"reward": hard, "at_least": threshold} for easy, (hard, threshold) in conditions.items()}
    check("gdpo", batch, discount, {"gdpo": {"whiten": whiten}, "rewards": REWARDS | {"conditions": written}}, wanted)


@given(sessions(), DISCOUNT, st.sampled_from(["token", "sequence"]))
def test_dgpo_with_the_difficulty_of_the_prompt(batch, discount, balance):
    rows = rows_of(batch, discount)
    total = total_of(rows)
    out = reference.over_mad(total, rows.labels, 1e-4)
    live = [False] * len(total)
    for group in reference.groups(rows.labels).values():
        for row in group:
            live[row] = reference.has_variance([total[each] for each in group])
    starts = [row for row, (_, turn) in enumerate(rows.labels) if turn == 0]
    responses = [range(a, b) for a, b in zip(starts, [*starts[1:], len(total)], strict=True)]
    z = 1.0
    if balance == "token" and sum(length for length, alive in zip(rows.lengths, live, strict=True) if alive):
        z = sum(rows.lengths) / sum(length for length, alive in zip(rows.lengths, live, strict=True) if alive)
    elif balance == "sequence" and any(live):
        z = len(responses) / sum(any(live[row] for row in mine) for mine in responses)
    valid = [group for group in reference.groups(rows.prompts).values() if any(live[row] for row in group)]
    once = [[row for row in group if rows.last[row]] for group in valid]
    factor = [z] * len(total)
    for group, weight in zip(valid, reference.difficulty_weights(once, rows.accuracy, 2.0), strict=True):
        for row in group:
            factor[row] *= weight
    wanted = reference.learnt([value * by for value, by in zip(out, factor, strict=True)])
    check("dgpo", batch, discount, {"dgpo": {"balance": balance}}, wanted)


@given(st.lists(sessions(), min_size=1, max_size=4), DISCOUNT, st.sampled_from(["soft", "window"]))
def test_hadw_compares_the_prompt_with_the_batch_each_response_once(batches, discount, anchor):
    memory, state = reference.History(anchor), None
    for batch in batches:
        rows = rows_of(batch, discount)
        wanted = reference.grpo(total_of(rows), rows.labels)
        known = reference.scored([one.accuracy for one in batch])
        if known:
            first = memory.capability is None and anchor == "soft"
            prior = memory.advance(statistics.fmean(known))
            for row, uid in enumerate(rows.prompts):
                mine = reference.scored([one.accuracy for one in batch if one.uid == uid])
                if mine and not first:
                    gap = statistics.fmean(mine) - prior
                    wanted[row] *= 1.3 * math.exp(-math.copysign(1.0, wanted[row]) * gap)
        state = check("hadw", batch, discount, {"hadw": {"anchor": anchor}}, wanted, state).state


@given(sessions(), DISCOUNT)
def test_focal_weights_are_those_of_the_prompt(batch, discount):
    rows = rows_of(batch, discount)
    out = reference.centered(total_of(rows), rows.labels)
    for row, uid in enumerate(rows.prompts):
        mine = reference.scored([one.accuracy for one in batch if one.uid == uid])
        out[row] *= 1 - statistics.fmean(mine) if mine else 1.0
    steps = ["weighted_sum", "center", "weight_by_focal"]
    check("compose", batch, discount, {"compose": {"steps": steps}}, reference.learnt(out))


@given(sessions(), DISCOUNT, st.sampled_from([1e-6, 0.5]))
def test_maxrl(batch, discount, epsilon):
    for one in batch:
        one.tool, one.right, one.form = [abs(entry) for entry in one.tool], abs(one.right), abs(one.form)
    rows = rows_of(batch, discount)
    wanted = reference.maxrl(total_of(rows), rows.labels, epsilon)
    check("maxrl", batch, discount, {"maxrl": {"epsilon": epsilon}}, wanted)


@given(sessions(), DISCOUNT)
def test_gd2po(batch, discount):
    rows = rows_of(batch, discount)
    wanted = reference.gd2po(rows.columns, rows.labels, rows.lengths, weights=WEIGHTS)
    check("gd2po", batch, discount, {}, wanted)
