"""The call of an estimator as verl makes it: gradients, a batch of padding, and an incomplete batch."""

import numpy as np
import pytest
import torch

from tests.calls import call, call_on_tensors, tensors
from tests.estimators.two_prompts import UIDS, X, config_for, fields
from tests.facts import facts
from verl_ext.core.row_index import RowIndex
from verl_ext.errors import IntegrationError
from verl_ext.registry import ADDED_ESTIMATORS

EVERY_ESTIMATOR = pytest.mark.parametrize("name", ADDED_ESTIMATORS)


@EVERY_ESTIMATOR
def test_advantages_require_no_gradients(name):
    rewards, mask = tensors([1.0, 0.0, 1.0, 0.0], [1, 2, 2, 1])
    rewards_with_gradients = rewards.clone().requires_grad_()
    mask_with_gradients = mask.float().requires_grad_()
    options = {"config": config_for(name), "components": fields()}

    plain = call_on_tensors(name, rewards, mask, UIDS, **options).tensor
    from_gradients = call_on_tensors(name, rewards_with_gradients, mask_with_gradients, UIDS, **options).tensor

    assert not from_gradients.requires_grad
    assert torch.equal(plain, from_gradients)


@EVERY_ESTIMATOR
@pytest.mark.filterwarnings("error")
def test_a_batch_of_padding_gets_zeros_and_does_not_change_the_state(name):
    padding_uids = ["pad0", "pad1", "pad2", "pad3"]
    no_tokens = [0, 0, 0, 0]

    result = call(name, X, padding_uids, no_tokens, config=config_for(name), components=fields())

    assert result.tensor.tolist() == [[0], [0], [0], [0]]
    assert result.state is None


def test_a_call_with_part_of_the_batch_is_rejected():
    rows_of_two_outputs = RowIndex.of_sessions(["a_0_0", "a_0_1"], np.zeros(2, dtype=bool))
    with pytest.raises(IntegrationError, match=facts("drgrpo", 3, 2)):
        call("drgrpo", [1.0, 0.0, 0.0], ["a", "a", "a"], rows=rows_of_two_outputs)
