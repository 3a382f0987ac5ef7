"""The call in verl's convention: what it accepts, what it refuses, and batches with little in them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.calls import call, metrics_of, tensors
from tests.estimators.small import UIDS, X, config_for, fields
from tests.facts import facts
from verl_ext import RunState, use_run_state
from verl_ext.core.rows import Rows
from verl_ext.errors import DataError, IntegrationError
from verl_ext.integration.advantage import estimator_function
from verl_ext.registry import INSTALLED

EVERY = pytest.mark.parametrize("name", INSTALLED)


@EVERY
def test_tensors_that_require_gradients_are_cut_off(name):
    rewards, mask = tensors([1.0, 0.0, 1.0, 0.0], [1, 2, 2, 1])
    settings, values = OmegaConf.create(config_for(name)), fields()
    found = []
    for given in ((rewards, mask), (rewards.clone().requires_grad_(), mask.float().requires_grad_())):
        with use_run_state(RunState()):
            found.append(estimator_function(name)(*given, UIDS, settings, non_tensor_batch=values)[0])
    assert not found[1].requires_grad
    assert torch.equal(found[0], found[1])


def test_the_loss_is_read_from_the_configuration_around_the_section():
    """token-sum takes no mean, so nothing is balanced; token-mean has z = 4 / 2."""
    whole = OmegaConf.create({"algorithm": {}, "actor_rollout_ref": {"actor": {"loss_agg_mode": "token-sum"}}})
    rewards, mask = tensors([1.0, 0.0, 1.0, 1.0], [1] * 4, torch.float64)
    for config, z in ((whole.algorithm, 1), (OmegaConf.create({}), 2)):
        with use_run_state(RunState()):
            found, _ = estimator_function("dgpo")(rewards, mask, UIDS, config)
        assert found[0, 0] == pytest.approx(z / 1.0001)  # 2 * 0.5 / (1 + 1e-4)


@EVERY
@pytest.mark.parametrize(
    ("rewards", "mask"), [(torch.zeros(4, 3), torch.ones(4, 2)), (torch.zeros(4), torch.ones(4)),
                          (torch.zeros(4, 2, 1), torch.ones(4, 2, 1))]
)  # fmt: skip
def test_tensors_must_be_rows_by_tokens(name, rewards, mask):
    with pytest.raises(DataError, match=facts(tuple(rewards.shape), tuple(mask.shape), "[rows, tokens]")):
        estimator_function(name)(rewards, mask, UIDS, OmegaConf.create(config_for(name)), non_tensor_batch=fields())


@EVERY
@pytest.mark.filterwarnings("error")
def test_an_empty_batch_gives_an_empty_result(name):
    run = RunState()
    with use_run_state(run):
        found, _ = estimator_function(name)(
            torch.zeros(0, 5), torch.zeros(0, 5), np.array([]), OmegaConf.create(config_for(name)), non_tensor_batch={}
        )
    assert found.shape == (0, 5)
    assert run == RunState()


@EVERY
@pytest.mark.filterwarnings("error")
def test_a_batch_of_padding_only_gives_zeros_and_does_not_tick(name):
    run = RunState()
    found = call(name, X, [f"pad{i}" for i in range(4)], [0] * 4, config=config_for(name), components=fields(),
                 state=run)  # fmt: skip
    assert found.tensor.tolist() == [[0]] * 4
    assert run == RunState()


@EVERY
def test_a_real_response_without_tokens_stays_in_the_statistics(name):
    """An empty mask alone is no padding: its reward counts, its own advantage is 0."""
    with_tokens = call(name, X, UIDS, [1] * 4, config=config_for(name, dgpo={"balance": "none"}), components=fields())
    without = call(name, X, UIDS, [0, 1, 1, 1], config=config_for(name, dgpo={"balance": "none"}), components=fields())
    assert without.rows[0] == 0
    np.testing.assert_array_equal(without.rows[1:], with_tokens.rows[1:])


def test_a_batch_in_which_every_row_is_rejected_is_counted():
    config = {"rewards": {"rejected": "leave_out"}}
    metrics = metrics_of("drgrpo", [1.0, 0.0, 1.0, 0.0], list("aabb"), lengths=[0] * 4, config=config)
    assert metrics == {"advantage/rejected_rows": 4}


def test_lengths_are_those_of_the_rows_that_are_left():
    """With `leave_out` the second row, which rollout correction rejected, changes nothing for the others."""
    config = config_for("gdpo", rewards={"keys": ["x"], "rejected": "leave_out"}, gdpo={"whiten": "token"})
    scores, lengths = [1.0, 7.0, 0.0, 3.0, 5.0], [1, 0, 4, 2, 3]
    found = call("gdpo", scores, list("aaabb"), lengths, config=config, components={"x": scores})
    left = [0, 2, 3, 4]
    kept = [scores[row] for row in left]
    wanted = call("gdpo", kept, list("aabb"), [lengths[row] for row in left], config=config, components={"x": kept})
    assert found.rows[left].tolist() == wanted.rows.tolist()
    assert found.rows[1] == 0


def test_a_trainer_that_passes_a_part_of_the_batch_is_named():
    rows = Rows.of_sessions(["a_0_0", "a_0_1"], np.zeros(2, dtype=bool))
    with pytest.raises(IntegrationError, match=facts("drgrpo", "3 rows", "batch of 2")):
        call("drgrpo", [1.0, 0.0, 0.0], ["a", "a", "a"], rows=rows)
