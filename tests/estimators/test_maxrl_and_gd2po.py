"""maxrl and gd2po: by hand, against plain loops over random batches, and what they refuse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import reference
from tests.batches import Rollout, rollouts
from tests.estimators.test_against_reference import KEYS, check, rewards
from tests.facts import facts
from verl_ext import Batch, Settings, build
from verl_ext.errors import DataError

WEIGHTS = st.lists(st.sampled_from([1.0, 0.5, 2.0, -1.0, 0.0, 3.25]), min_size=3, max_size=3).filter(any)


def positive(rollout: Rollout) -> Rollout:
    columns = {key: np.abs(column).tolist() for key, column in rollout.columns.items()}
    return dataclasses.replace(rollout, columns=columns)


@given(rollouts(keys=KEYS), WEIGHTS, st.sampled_from([1e-6, 1e-3, 0.5]))
def test_maxrl_is_the_plain_loop(rollout, weights, epsilon):
    rollout, weights = positive(rollout), list(map(abs, weights))
    total = reference.weighted_total(list(rollout.columns.values()), weights)
    config = rewards(weights) | {"maxrl": {"epsilon": epsilon}}
    check("maxrl", rollout, config, reference.maxrl(total, rollout.uids, epsilon))


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("conflict", ["hard", "snr"])
@pytest.mark.parametrize("weights", [[1, 1], [1000, 1], [1e-9, 1e-9]])
def test_a_reward_of_tenths_in_float32_conflicts_as_in_float64(size, conflict, weights):
    """The middle one of 0.1, 0.2, 0.3 in float32 is below its group's mean by rounding: that is no sign."""
    tenths = np.random.default_rng(size).integers(0, 11, (200 * size, 2)) / 10
    uids = [row // size for row in range(len(tenths))]
    rewards = {"rewards": {"keys": ["x", "y"], "weights": weights}}
    chain = build("gd2po", Settings.parse(rewards | {"gd2po": {"conflict": conflict, "whiten": "none"}}))
    exact, rounded = (chain(Batch.of(each, uids, keys=("x", "y"))) for each in (tenths, tenths.astype(np.float32)))
    assert exact.metrics == rounded.metrics
    assert exact.metrics["conflict_share"] > 0.2
    np.testing.assert_allclose(rounded.advantages, exact.advantages, atol=1e-5 * weights[0])


def test_a_negative_reward_is_an_error_that_says_to_map_it():
    batch = Batch.of([[1], [-1.0]], ["p", "p"])
    with pytest.raises(DataError, match=facts("at least 0", "found -1", "'p'", "[-1, 1] to [0, 1]")):
        build("maxrl", Settings())(batch)
    weighed = Settings.parse({"rewards": {"keys": ["x", "y"], "weights": [1, -1]}})
    with pytest.raises(DataError, match=facts("no negative weight")):
        build("maxrl", weighed)(Batch.of([[0, 1], [1, 0]], ["p", "p"], keys=("x", "y")))


@given(
    rollouts(keys=KEYS),
    WEIGHTS,
    st.sampled_from([("hard", 0.2), ("snr", 0.2), ("snr", 0.8), ("snr", 0.0), ("snr", 1.0)]),
    st.sampled_from(["token", "sequence", "none"]),
    st.sampled_from([1e-6, 1e-4]),
    st.booleans(),
)
def test_gd2po_is_the_plain_loop(rollout, weights, conflict, whiten, epsilon, norm_by_std):
    kind, tau = conflict
    wanted = reference.gd2po(
        rollout.columns,
        rollout.uids,
        rollout.lengths,
        weights=weights,
        conflict=kind,
        tau=tau,
        whiten=whiten,
        epsilon=epsilon,
        norm_by_std=norm_by_std,
    )
    own = {"conflict": kind, "tau": tau, "whiten": whiten, "epsilon": epsilon}
    check("gd2po", rollout, rewards(weights) | {"gd2po": own, "norm_adv_by_std_in_grpo": norm_by_std}, wanted)


def test_a_response_exactly_at_tau_is_kept():
    """Without std, x of the group is -1 1 0 0 and y 1 -3 2 0: the first response has |-1 + 1| / 2 = 0."""
    own = {"whiten": "none", "conflict": "snr", "tau": 0.0}
    settings = Settings.parse({"rewards": {"keys": ["x", "y"]}, "gd2po": own, "norm_adv_by_std_in_grpo": False})
    batch = Batch.of([[1.0, 4.0], [3, 0], [2, 5], [2, 3]], list("aaaa"), keys=("x", "y"))
    assert build("gd2po", settings)(batch).metrics["dropped_share"] == 0
