"""The table of docs/pages/losses.md, each row on verl's own `agg_loss`.

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


def in_verl(mode, factor=None, micro_batches=MICRO_BATCHES):
    """What verl adds up over the micro-batches of one mini-batch, each padded to its own longest response."""
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


@pytest.mark.parametrize(
    ("mode", "factor", "expected"),
    [
        # TRL loss_type=grpo: the mean of each response's own mean
        ("seq-mean-token-mean", None, (1.75 / 4 + 1.0 / 2 - 0.25 / 3 + 3.0 / 1) / 4),
        # TRL loss_type=dapo: 1.75 + 1.0 - 0.25 + 3.0 by the tokens of the whole batch
        ("token-mean", None, 5.5 / 10),
        # TRL loss_type=dr_grpo: by a constant
        ("seq-mean-token-sum-norm", LIMIT, 5.5 / (4 * LIMIT)),
        pytest.param("token-sum", None, 5.5, marks=TOKEN_SUM),
        ("seq-mean-token-sum", None, 5.5 / 4),
    ],
)
def test_what_each_mode_divides_by(mode, factor, expected):
    assert in_verl(mode, factor) == pytest.approx(expected, abs=1e-6)


def test_without_the_constant_verls_dr_grpo_depends_on_the_micro_batches():
    # widths 4 and 3: (2.75/4 + 2.75/3)/4; other micro-batches, widths 4 and 2: (1.75 - 0.25)/4/4 + (1.0 + 3.0)/2/4
    assert in_verl("seq-mean-token-sum-norm") == pytest.approx((2.75 / 4 + 2.75 / 3) / 4, abs=1e-6)
    reordered = in_verl("seq-mean-token-sum-norm", micro_batches=([0, 2], [1, 3]))
    assert reordered == pytest.approx((1.5 / 4 + 4.0 / 2) / 4, abs=1e-6)
