"""Rewards of any scale: a group whose rewards cancel is exactly 0, and the scale of one reward changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.batches import Rollout, rollouts
from tests.estimators.estimator_variants import call_on_rollout
from verl_ext import Batch, Chain, Settings, build

KEYS = ("a", "b")
REWARDS = {"rewards": {"keys": list(KEYS), "accuracy_key": "acc"}}
NORMALIZED_SUM = ["center", "scale_by_std", "weighted_sum"]
BALANCE_BY_SEQUENCES = {"step": "balance", "over": "sequence"}
EVERY_CHAIN = pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param("gdpo", {}, id="gdpo"),
        pytest.param("gdpo", {"gdpo": {"scale": "mad"}}, id="gdpo, mad"),
        pytest.param("gdpo", {"gdpo": {"whiten": "none"}}, id="gdpo, not whitened"),
        pytest.param("hadw", {"hadw": {"base": "gdpo", "anchor": "fixed"}}, id="hadw on gdpo"),
        pytest.param("compose", {"compose": {"steps": [*NORMALIZED_SUM, "whiten", "balance"]}}, id="balanced"),
        pytest.param(
            "compose", {"compose": {"steps": [*NORMALIZED_SUM, BALANCE_BY_SEQUENCES]}}, id="balanced by sequences"
        ),
        pytest.param(
            "compose", {"compose": {"steps": [*NORMALIZED_SUM, "whiten", "weight_by_difficulty"]}}, id="by difficulty"
        ),
    ],
)


@st.composite
def canceling_rollouts(draw: st.DrawFn) -> Rollout:
    """Return groups of 4 or 8 responses in which `b` falls as `a` rises, as float32.

    Both rewards have a scale and an offset. If each is divided by its standard deviation, their sum is constant.
    """
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    group_count = draw(st.integers(1, 6))
    group_size = int(random.choice([4, 8]))
    highest_level = int(random.choice([1, 3, 10]))
    levels: list[int] = []
    for _ in range(group_count):
        random_levels = random.integers(0, highest_level + 1, group_size - 2)
        levels_of_group = random.permutation([0, highest_level, *random_levels])
        levels.extend(levels_of_group.tolist())
    fraction = np.array(levels) / highest_level  # of each response, in [0, 1]
    columns = {}
    for key, values in (("a", fraction), ("b", 1 - fraction)):
        scale = 10 ** random.uniform(-3, 3)
        offset = random.choice([0.0, -1.0, 0.5, 10.0])
        column = np.float32(scale * (offset + values))
        columns[key] = column.tolist()
    uids = [f"p{row // group_size}" for row in range(len(levels))]
    return Rollout(uids, columns, lengths=[1] * len(levels), accuracy=fraction.tolist())


def with_nonzero_variance_group(rollout: Rollout) -> Rollout:
    """Add a group of four responses, in which `a` is high once and `b` is high twice."""
    a, b = rollout.columns.values()
    low_a = min(a)
    low_b = min(b)
    new_a = [max(a), low_a, low_a, low_a]
    new_b = [max(b), max(b), low_b, low_b]
    return Rollout(
        uids=[*rollout.uids, "new", "new", "new", "new"],
        columns={"a": [*a, *new_a], "b": [*b, *new_b]},
        lengths=[1] * (len(a) + 4),
        accuracy=[*rollout.accuracy, 1.0, 0.0, 0.0, 0.0],
    )


@EVERY_CHAIN
@given(rollout=canceling_rollouts())
def test_if_rewards_cancel_in_every_group_all_advantages_are_exactly_0(name, config, rollout):
    result = call_on_rollout(name, REWARDS | config, rollout, state=None)

    assert (result.tensor == 0).all()
    assert result.metrics.get("compose/zero_variance_fraction", 1) == 1
    assert result.metrics.get("compose/valid_groups", 0) == 0


@EVERY_CHAIN
@given(rollout=canceling_rollouts())
def test_a_canceling_group_is_exactly_0_next_to_a_varying_group(name, config, rollout):
    """An update that skips zero-advantage rows skips the group, and neither balance nor difficulty counts it."""
    both = with_nonzero_variance_group(rollout)
    size = len(both.uids)

    result = call_on_rollout(name, REWARDS | config, both, state=None)

    assert (result.rows[:-4] == 0).all()
    assert (result.rows[-4:] != 0).all()
    assert result.metrics.get("compose/balance_z", size / 4) == size / 4
    assert result.metrics.get("compose/valid_groups", 1) == 1


@EVERY_CHAIN
@given(rollout=rollouts(keys=KEYS, lengths=1), power=st.integers(-10, 10))
def test_the_scale_of_one_reward_changes_nothing(name, config, rollout, power):
    """The scale is a power of two, so that float32 and float64 hold the scaled rewards exactly."""
    scaled_a = [value * 2.0**power for value in rollout.columns["a"]]
    scaled = replace(rollout, columns=rollout.columns | {"a": scaled_a})
    chain = build(name, Settings.parse(REWARDS | config))

    advantages = chain(rollout.batch()).advantages
    advantages_of_scaled = chain(scaled.batch()).advantages

    np.testing.assert_allclose(advantages_of_scaled, advantages, rtol=1e-9, atol=1e-9)


@st.composite
def centered_totals(draw: st.DrawFn) -> tuple[np.ndarray, list[int]]:
    """Return rewards `[N, 2]` in eighths, and the group of each row. The sums of the rewards of a group have mean 0.

    Groups have 3 or 4 responses. The second reward may be 0 for all responses of a group.
    """
    group_size = draw(st.sampled_from([3, 4]))
    group_count = draw(st.integers(1, 4))
    levels = st.lists(st.integers(-3, 3), min_size=group_size, max_size=group_size)
    levels_or_zeros = st.one_of(st.just([0] * group_size), levels)
    groups = []
    for _ in range(group_count):
        first = group_size * np.array(draw(levels))  # multiples of the size, so that the mean is a whole number
        second = np.array(draw(levels_or_zeros))
        first = first - first.mean() - second.mean()
        groups.append(np.stack([first, second], axis=1) / 8)
    group_of_row = np.repeat(np.arange(group_count), group_size)
    return np.concatenate(groups), group_of_row.tolist()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param("gdpo", {}, id="gdpo"),
        pytest.param("grpo", {}, id="grpo"),
        pytest.param("drgrpo", {}, id="drgrpo"),
        pytest.param("dgpo", {}, id="dgpo"),
        pytest.param(
            "compose", {"compose": {"steps": ["weighted_sum", {"step": "center", "leave_one_out": True}]}}, id="RLOO"
        ),
    ],
)
@given(rewards_and_groups=centered_totals(), constant=st.sampled_from([1000, -1000, 972.125, 12.5]))
def test_opposite_constants_added_to_two_rewards_change_nothing(name, config, rewards_and_groups, constant):
    """The constants are eighths as well, so that all sums of two rewards stay the same."""
    rewards, group_of_row = rewards_and_groups
    accuracy = [float(row % 2) for row in range(len(rewards))]
    chain = build(name, Settings.parse(REWARDS | config))
    batch = Batch.of(rewards, group_of_row, keys=KEYS, accuracy=accuracy)
    shifted_rewards = rewards + np.array([constant, -constant])
    shifted = Batch.of(shifted_rewards, group_of_row, keys=KEYS, accuracy=accuracy)

    np.testing.assert_allclose(chain(shifted).advantages, chain(batch).advantages, rtol=1e-9, atol=1e-9)


def batch_of_groups(rewards: np.ndarray) -> Batch:
    """Return the batch of rewards `[groups, responses, 2]`."""
    group_count, group_size, _ = rewards.shape
    group_of_row = np.repeat(np.arange(group_count), group_size)
    return Batch.of(rewards.reshape(-1, 2), group_of_row.tolist(), keys=KEYS)


def float32_batch_that_cancels(group_count: int, group_size: int) -> Batch:
    """Return groups in which `b` falls as `a` rises. Each group has random scales and offsets.

    Groups in which one reward is constant are left out: near an offset of 1e5, float32 rounds small changes away.
    """
    random = np.random.default_rng(0)
    highest_level = random.choice([1, 3, 10, 1000], (group_count, 1))
    fraction = random.integers(0, highest_level + 1, (group_count, group_size)) / highest_level
    scale_a, scale_b = 10 ** random.uniform(-3, 3, (2, group_count, 1))
    absolute_offset = random.choice([0.0, 0.5, 10.0, 1e3, 1e5], (2, group_count, 1))
    offset_a, offset_b = absolute_offset * random.choice([-1, 1], (2, group_count, 1))
    a = offset_a + scale_a * fraction  # [groups, responses]
    b = offset_b - scale_b * fraction
    rewards = np.stack([a, b], axis=2).astype(np.float32).astype(np.float64)
    batch = batch_of_groups(rewards)
    both_vary = batch.groups.varies(batch.returns).all(axis=1)  # [groups]
    return batch_of_groups(rewards[both_vary])


def gdpo(scale: str) -> Chain:
    """Return the chain of gdpo."""
    return build("gdpo", Settings.parse(REWARDS | {"gdpo": {"scale": scale}}))


@pytest.mark.parametrize("scale", ["std", "mad"])
def test_rounding_is_never_a_difference_in_ten_thousand_groups(scale):
    """A tolerance of one unit in the last place would leave a difference in some groups."""
    batch = float32_batch_that_cancels(group_count=13_000, group_size=8)
    assert len(batch.groups) > 10_000

    result = gdpo(scale)(batch)

    assert np.count_nonzero(result.advantages) == 0


@pytest.mark.parametrize("scale", ["std", "mad"])
@pytest.mark.parametrize(("units", "is_kept"), [(7, False), (9, True), (12, True)])
def test_a_difference_that_rounding_does_not_explain_is_kept(units, is_kept, scale):
    """At an offset of 1e5, rounding explains up to 4 units in the last place of each of the two rewards."""
    a = 1e5 + np.array([1.0, 0.0] * 4)
    b = 2e5 + 1 - a
    b[0] += units * float(np.spacing(np.float32(1e5)))
    rewards = np.stack([a, b], axis=1)
    assert (rewards == rewards.astype(np.float32)).all()

    advantages = gdpo(scale)(batch_of_groups(rewards[None])).advantages

    assert (advantages[0] > 0.1) == is_kept
    assert advantages.any() == is_kept
