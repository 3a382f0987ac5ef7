"""On random batches with padding and sessions of several outputs, each trainer computes what the core computes."""

from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.integration.trainers.core_advantages import (
    CONFIGURATIONS,
    TRAINERS,
    assert_trainer_equals_core,
    config_for,
)
from tests.integration.trainers.random_batches import random_batches
from tests.integration.trainers.trainer_batches import TrainerBatch


@pytest.mark.parametrize("case", CONFIGURATIONS)
@pytest.mark.parametrize("trainer", TRAINERS)
@settings(max_examples=15)
@given(data=st.data())
def test_trainer_computes_the_advantages_of_the_core(trainer: str, case: str, data: st.DataObject) -> None:
    """A hook masks the first prompt in a third of the runs. The responses of that prompt count as rejected."""
    runs = import_module(f"tests.integration.trainers.{trainer}_runs")
    two_batches = st.lists(random_batches(sessions=runs.HAS_SESSIONS), min_size=2, max_size=2)
    batches = data.draw(two_batches)
    hooked = data.draw(st.integers(0, 2)) == 0
    assert_trainer_equals_core(runs, case, batches, hooked=hooked)


def expected_contributions(batch: TrainerBatch, *, norm: bool) -> list[float]:
    """Return the contributions of the rewards `a` and `b`, and of the rest, to the advantages of verl's grpo."""
    rows = [rows[-1] for rows in batch.trajectories]
    uids = [batch.uids[row] for row in rows]
    scores = [float(batch.score[row]) for row in rows]
    # A reward that is not scored contributes 0.
    rewards = np.nan_to_num(np.stack([batch.columns["a"][rows], batch.columns["b"][rows]], axis=1))
    advantages = reference.grpo(scores, uids, norm_by_std=norm)
    return reference.shares(rewards.tolist(), scores, advantages, uids)


@pytest.mark.parametrize("trainer", TRAINERS)
@settings(max_examples=10)
@given(data=st.data(), norm=st.booleans())
def test_contributions_with_verls_grpo_are_those_of_its_advantages(
    trainer: str, data: st.DataObject, norm: bool
) -> None:
    runs = import_module(f"tests.integration.trainers.{trainer}_runs")
    batch = data.draw(random_batches(sessions=runs.HAS_SESSIONS))
    algorithm = {"rewards": {"keys": ["a", "b"]}, "norm_adv_by_std_in_grpo": norm}
    _, metrics = runs.run_step(runs.make_trainer(config_for("grpo", algorithm)), batch, hooked=False)
    contributions = {}
    for name, value in metrics.items():
        prefix, _, key = name.rpartition("/")
        if prefix == "advantage/contribution":
            contributions[key] = value
    # Nothing is expected if no group has variance.
    expected = dict(zip(("a", "b", "rest"), expected_contributions(batch, norm=norm), strict=False))
    assert contributions == pytest.approx(expected, abs=1e-5, rel=1e-5)
