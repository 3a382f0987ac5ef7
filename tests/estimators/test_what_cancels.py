"""Two properties of rewards of any scale: what cancels is exactly 0, and the scale of one reward changes nothing."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import Rollout, rollouts
from tests.calls import Call, call
from verl_ext import Batch, Settings, build

KEYS = ("a", "b")
REWARDS = {"rewards": {"keys": list(KEYS), "accuracy_key": "acc"}}
EACH = ["center", "scale_by_std", "weighted_sum"]
CHAINS = {
    "gdpo": ("gdpo", {}),
    "gdpo, mad": ("gdpo", {"gdpo": {"scale": "mad"}}),
    "gdpo, not whitened": ("gdpo", {"gdpo": {"whiten": "none"}}),
    "hadw on gdpo": ("hadw", {"hadw": {"base": "gdpo", "anchor": "fixed"}}),
    "balanced": ("compose", {"compose": {"steps": [*EACH, "whiten", "balance"]}}),
    "balanced by sequences": ("compose", {"compose": {"steps": [*EACH, {"step": "balance", "over": "sequence"}]}}),
    "by difficulty": ("compose", {"compose": {"steps": [*EACH, "whiten", "weight_by_difficulty"]}}),
}
EVERY = pytest.mark.parametrize(("name", "config"), CHAINS.values(), ids=CHAINS.keys())


def run(name: str, config: dict[str, Any], columns: np.ndarray, uids: list[str], accuracy: np.ndarray) -> Call:
    fields = {"a": columns[:, 0], "b": columns[:, 1], "acc": accuracy}
    return call(name, [0.0] * len(uids), uids, config=REWARDS | config, components=fields)


@st.composite
def canceling(draw: st.DrawFn) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Groups of 4 or 8 in which the second reward is what the first lacks: `[N, 2]` of float32, uids, accuracies."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    low, steps = rng.choice([0.0, -1.0, 0.5, 10.0], 2), int(rng.choice([1, 3, 10]))
    scales = 10 ** rng.uniform(-3, 3, 2)
    size, groups = int(rng.choice([4, 8])), draw(st.integers(1, 6))
    drawn = [[0, steps, *rng.integers(0, steps + 1, size - 2)] for _ in range(groups)]
    first = np.concatenate([rng.permutation(levels) for levels in drawn]) / steps
    columns = scales * (low + np.stack([first, 1 - first], axis=1))
    return columns.astype(np.float32), np.repeat([f"p{group}" for group in range(groups)], size).tolist(), first


@EVERY
@given(batch=canceling())
def test_if_the_rewards_of_every_group_cancel_all_advantages_are_exactly_0(name, config, batch):
    found = run(name, config, *batch)
    assert (found.tensor == 0).all()
    assert found.metrics.get("compose/zero_variance_fraction", 1) == 1
    assert found.metrics.get("compose/valid_groups", 0) == 0


@EVERY
@given(batch=canceling())
def test_a_group_whose_rewards_cancel_is_exactly_0_beside_a_group_with_variance(name, config, batch):
    """So an update that skips rows of advantage 0 skips these, and neither balance nor difficulty counts them."""
    columns, uids, accuracy = batch
    both = np.vstack([columns, columns[:4].min(axis=0) + [[1, 1], [0, 1], [0, 0], [0, 0]] * np.ptp(columns, axis=0)])
    found = run(name, config, both.astype(np.float32), [*uids, *["live"] * 4], np.append(accuracy, [1, 0, 0, 0]))
    live = found.rows != 0
    assert not live[: len(uids)].any()
    assert live[[len(uids), -2, -1]].all()
    assert found.metrics.get("compose/balance_z", len(live) / 4) == len(live) / 4
    assert found.metrics.get("compose/valid_groups", 1) == 1


@EVERY
@given(rollout=rollouts(keys=KEYS, lengths=1), power=st.integers(-10, 10))
def test_the_scale_of_one_reward_changes_nothing(name, config, rollout: Rollout, power):
    """By powers of two, which float32 and float64 hold exactly."""
    columns = {"a": (np.array(rollout.columns["a"]) * 2.0**power).tolist(), "b": rollout.columns["b"]}
    scaled = Rollout(rollout.uids, columns, rollout.lengths, rollout.accuracy)
    chain = build(name, Settings.parse(REWARDS | config))
    found, wanted = (chain(each.batch()).advantages for each in (scaled, rollout))
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


OFFSETS = {
    "gdpo": CHAINS["gdpo"],
    "grpo": ("grpo", {}),
    "drgrpo": ("drgrpo", {}),
    "dgpo": ("dgpo", {}),
    "RLOO": ("compose", {"compose": {"steps": ["weighted_sum", {"step": "center", "leave_one_out": True}]}}),
}


@st.composite
def centered_totals(draw: st.DrawFn) -> tuple[np.ndarray, list[str]]:
    """Groups of 3 or 4 whose totals have mean exactly 0; the second reward is 0 or varies: `[N, 2]` of eighths."""
    size, groups = draw(st.sampled_from([3, 4])), draw(st.integers(1, 4))
    levels = st.lists(st.integers(-3, 3), min_size=size, max_size=size)
    columns = []
    for _ in range(groups):
        first = size * np.array(draw(levels))
        second = np.array(draw(st.one_of(st.just([0] * size), levels)))
        columns.append(np.stack([first - first.mean() - second.mean(), second], axis=1) / 8)
    return np.concatenate(columns), np.repeat(np.arange(groups), size).tolist()


@pytest.mark.parametrize(("name", "config"), OFFSETS.values(), ids=OFFSETS)
@given(drawn=centered_totals(), constant=st.sampled_from([8000, -8000, 7777, 100]))
def test_opposite_constants_added_to_two_rewards_change_nothing(name, config, drawn, constant):
    """In eighths, which floats hold exactly: no total changes."""
    columns, labels = drawn
    chain = build(name, Settings.parse(REWARDS | config))
    moved = columns + np.array([1, -1]) * constant / 8
    accuracy = (np.arange(len(labels)) % 2).astype(float)
    found, wanted = (
        chain(Batch.of(each, labels, keys=KEYS, accuracy=accuracy)).advantages for each in (moved, columns)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


def rounded_to_cancel(groups: int, size: int) -> Batch:
    """Two rewards of which the second is what the first lacks, with scales and offsets of their own, as float32.

    Only groups in which both vary: next to an offset of 1e5 float32 keeps nothing of a small one.
    """
    rng = np.random.default_rng(0)
    levels = rng.choice([1, 3, 10, 1000], (groups, 1))
    first = rng.integers(0, levels + 1, (groups, size)) / levels
    scales = 10 ** rng.uniform(-3, 3, (2, groups, 1))
    offsets = rng.choice([0.0, 0.5, 10.0, 1e3, 1e5], (2, groups, 1)) * rng.choice([-1, 1], (2, groups, 1))
    exact = np.stack([offsets[0] + scales[0] * first, offsets[1] - scales[1] * first], axis=2)
    columns = exact.astype(np.float32).astype(np.float64)
    batch = Batch.of(columns.reshape(-1, 2), np.repeat(np.arange(groups), size).tolist(), keys=KEYS)
    both = batch.groups.varies(batch.returns).all(axis=1)
    kept = columns[both]
    return Batch.of(kept.reshape(-1, 2), np.repeat(np.arange(len(kept)), size).tolist(), keys=KEYS)


@pytest.mark.parametrize("scale", ["std", "mad"])
def test_rounding_is_never_a_difference_in_ten_thousand_groups(scale: str) -> None:
    """One unit in the last place would leave some of them."""
    batch = rounded_to_cancel(13_000, 8)
    assert len(batch.groups) > 10_000
    found = build("gdpo", Settings.parse(REWARDS | {"gdpo": {"scale": scale}}))(batch).advantages
    assert np.count_nonzero(batch.groups.sum(np.abs(found))) == 0


@pytest.mark.parametrize("scale", ["std", "mad"])
@pytest.mark.parametrize(("units", "live"), [(7, False), (9, True), (12, True)])
def test_a_difference_that_rounding_does_not_explain_is_kept(units: int, live: bool, scale: str) -> None:
    """Rounding is taken to explain four units in the last place of each of the two rewards, at an offset of 1e5."""
    first = 1e5 + np.array([1.0, 0.0] * 4)
    second = 2e5 + 1 - first
    second[0] += units * float(np.spacing(np.float32(1e5)))
    columns = np.stack([first, second], axis=1)
    assert (columns == columns.astype(np.float32)).all()
    found = build("gdpo", Settings.parse(REWARDS | {"gdpo": {"scale": scale}}))(Batch.of(columns, ["g"] * 8, keys=KEYS))
    assert (found.advantages[0] > 0.1) == live
    assert found.advantages.any() == live
