"""The call in verl's convention: what it accepts, what it refuses, and batches with little in them."""

import numpy as np
import pytest
import torch

from tests.calls import call, call_on_tensors, tensors
from tests.estimators.small import UIDS, X, config_for, fields
from tests.facts import facts
from verl_ext.core.row_index import RowIndex
from verl_ext.errors import IntegrationError
from verl_ext.registry import ADDED_ESTIMATORS

EVERY = pytest.mark.parametrize("name", ADDED_ESTIMATORS)


@EVERY
def test_advantages_require_no_gradients(name):
    rewards, mask = tensors([1.0, 0.0, 1.0, 0.0], [1, 2, 2, 1])
    found = [
        call_on_tensors(name, *given, UIDS, config=config_for(name), components=fields()).tensor
        for given in ((rewards, mask), (rewards.clone().requires_grad_(), mask.float().requires_grad_()))
    ]
    assert not found[1].requires_grad
    assert torch.equal(found[0], found[1])


@EVERY
@pytest.mark.filterwarnings("error")
def test_a_batch_of_padding_gives_zeros_and_does_not_change_the_state(name):
    found = call(name, X, [f"pad{i}" for i in range(4)], [0] * 4, config=config_for(name), components=fields())
    assert found.tensor.tolist() == [[0]] * 4
    assert found.state is None


def test_a_part_of_the_batch_is_rejected():
    rows = RowIndex.of_sessions(["a_0_0", "a_0_1"], np.zeros(2, dtype=bool))
    with pytest.raises(IntegrationError, match=facts("drgrpo", 3, 2)):
        call("drgrpo", [1.0, 0.0, 0.0], ["a", "a", "a"], rows=rows)
