"""The table of docs/pages/methods/losses.md, each row on verl's own `agg_loss`.

Four responses of 4, 2, 3 and 1 tokens in two groups of two, trained in two micro-batches of two as verl trains them:
each micro-batch is aggregated with the mini-batch's token count and size, and the results are added.
"""

import inspect

import pytest
import torch
from verl.trainer.ppo.core_algos import agg_loss

LENGTHS = torch.tensor([4, 2, 3, 1])
MASK = (torch.arange(4) < LENGTHS[:, None]).float()
LOSS = torch.tensor([[0.5, -1.0, 2.0, 0.25], [1.5, -0.5, 9.0, 9.0], [-2.0, 1.0, 0.75, 9.0], [3.0, 9.0, 9.0, 9.0]])
LIMIT = 8  # the longest response that may be generated
MICRO_BATCHES = ([0, 1], [2, 3])
TOKEN_SUM = pytest.mark.skipif('"token-sum"' not in inspect.getsource(agg_loss), reason="this verl has no token-sum")


def loss_of_verl(mode, factor=None, micro_batches=MICRO_BATCHES):
    """Return the sum over the micro-batches of a mini-batch, each padded to its own longest response."""
    total = torch.tensor(0.0)
    for rows in micro_batches:
        width = int(LENGTHS[rows].max())
        total += agg_loss(
            LOSS[rows, :width],
            MASK[rows, :width],
            mode,
            batch_num_tokens=int(MASK.sum()),
            global_batch_size=len(LOSS),
            loss_scale_factor=factor,
        )
    return total.item()


SUM_0, SUM_1, SUM_2, SUM_3 = 1.75, 1.0, -0.25, 3.0
"""The sum of the losses of each response."""
SUM = SUM_0 + SUM_1 + SUM_2 + SUM_3


@pytest.mark.parametrize(
    ("mode", "factor", "expected"),
    [
        # TRL loss_type=grpo: the mean of each response's own mean
        ("seq-mean-token-mean", None, (SUM_0 / 4 + SUM_1 / 2 + SUM_2 / 3 + SUM_3 / 1) / 4),
        # TRL loss_type=dapo: divided by the tokens of the whole batch
        ("token-mean", None, SUM / 10),
        # TRL loss_type=dr_grpo: divided by a constant
        ("seq-mean-token-sum-norm", LIMIT, SUM / (4 * LIMIT)),
        pytest.param("token-sum", None, SUM, marks=TOKEN_SUM),
        ("seq-mean-token-sum", None, SUM / 4),
    ],
)
def test_divisor_of_each_mode(mode, factor, expected):
    assert loss_of_verl(mode, factor) == pytest.approx(expected, abs=1e-6)


def test_dr_grpo_without_the_constant_depends_on_the_micro_batches():
    """Each micro-batch is divided by its own width, and by the four responses of the mini-batch."""
    of_width_4 = (SUM_0 + SUM_1) / 4
    of_width_3 = (SUM_2 + SUM_3) / 3
    loss = loss_of_verl("seq-mean-token-sum-norm")
    assert loss == pytest.approx((of_width_4 + of_width_3) / 4, abs=1e-6)

    of_width_4 = (SUM_0 + SUM_2) / 4
    of_width_2 = (SUM_1 + SUM_3) / 2
    loss_of_other_micro_batches = loss_of_verl("seq-mean-token-sum-norm", micro_batches=([0, 2], [1, 3]))
    assert loss_of_other_micro_batches == pytest.approx((of_width_4 + of_width_2) / 4, abs=1e-6)
