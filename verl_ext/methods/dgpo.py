r"""DGPO: "MathForge", arXiv 2601.20614, section 3: difficulty-aware group policy optimization.

    A_i = n_g (r_i - mean_g(r)) / (sum_g |r - mean_g(r)| + 1e-4)         DGAE: divided by the mean absolute deviation
    A_i = z A_i               z = sum_all len / sum_valid len            balancing for groups without variance
    A_i = lambda_g A_i        lambda = B_v softmax(-acc_g / T)           DQW: over the B_v valid groups, 1 elsewhere

`r` is the score or the weighted sum of the rewards, `acc_g` is the group's mean accuracy, and T = 2. A group is valid
if its reward has nonzero variance. A KL term in the reward is added in valid groups only.

`z` is exact for `loss_agg_mode=token-mean` with one mini-batch per step. If the loss averages over sequences, the
factor is the number of rows of the batch divided by the number of valid rows (`balance=sequence`). `balance=auto`
chooses by the loss. With several mini-batches the factor of the whole batch is only approximate, also in the authors'
code.

Edge cases: a group of one response, or with a range of at most 1e-6 max(1, |mean|), is not valid and has advantage 0.
If no group is valid, z = 1. A valid group with accuracy 0 has variance only in another reward. Its weight is computed
as if its accuracy were 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import Step
from verl_ext.core.groups import Array
from verl_ext.core.post_sum import Balance, WeightByDifficulty
from verl_ext.core.schema import bounded
from verl_ext.core.steps import Center, ScaleByMad, ScaleByStd, WeightedSum
from verl_ext.methods.method import Method
from verl_ext.settings import Settings


@dataclass(frozen=True)
class DgpoSettings:
    """`algorithm.dgpo`."""

    dgae: bool = True
    """Whether to divide by the group's mean absolute deviation instead of its standard deviation."""
    dqw: bool = True
    """Whether to weight prompts by difficulty."""
    dqw_temp: float = bounded(WeightByDifficulty.dqw_temp, low=1e-6, only_with={"dqw": (True,)})
    """Temperature of these weights. A smaller value gives hard prompts more weight."""
    balance: Literal["auto", "token", "sequence", "none"] = "auto"
    """Unit over which the loss averages: `token`, `sequence`, or `none`. `auto` follows the actor's
    `loss_agg_mode`."""


@dataclass(frozen=True)
class WeightedSumWithKlInValidGroups(WeightedSum):
    """Sum the weighted rewards, and add the KL term only in groups whose sum of rewards has nonzero variance."""

    name: ClassVar[str] = "weighted_sum_with_kl_in_valid_groups"

    def kl_term(self, total: Array, kl_reward: Array, batch: Batch) -> Array:
        is_valid = batch.groups.broadcast(batch.groups.varies(total))
        return np.where(is_valid, kl_reward, 0.0)


def steps_of(section: DgpoSettings, settings: Settings) -> Sequence[Step]:
    """Return the steps: scale by the mean absolute deviation, balance, and weight by difficulty.

    >>> from verl_ext.core.chain import Chain
    >>> correct = [1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    >>> batch = Batch.of([[value] for value in correct], list("aaaabbbbcccc"), accuracy=correct)
    >>> chain = Chain(tuple(steps_of(DgpoSettings(), Settings())))
    >>> chain(batch).advantages.round(3)
    array([ 3.373, -1.124, -1.124, -1.124,  0.876,  0.876,  0.876, -2.627,
            0.   ,  0.   ,  0.   ,  0.   ])
    """
    weighted_sum = WeightedSumWithKlInValidGroups() if settings.kl_in_reward else WeightedSum()
    steps: list[Step] = [weighted_sum, Center()]
    if section.dgae:
        steps.append(ScaleByMad(1e-4))
    elif settings.norm_by_std:
        steps.append(ScaleByStd(1e-6))
    balance = balance_for(settings.loss_agg_mode) if section.balance == "auto" else section.balance
    if balance != "none":
        steps.append(Balance(balance))
    if section.dqw:
        steps.append(WeightByDifficulty(section.dqw_temp))
    return steps


def balance_for(loss_agg_mode: str) -> Literal["token", "sequence", "none"]:
    """The balancing that fits a loss: what the loss averages over; `token-sum` does not average.

    >>> balance_for("token-mean"), balance_for("seq-mean-token-sum"), balance_for("token-sum")
    ('token', 'sequence', 'none')
    """
    if loss_agg_mode == "token-mean":
        return "token"
    return "sequence" if loss_agg_mode.startswith("seq-mean") else "none"


DGPO = Method(
    paper="DGPO (MathForge), arXiv 2601.20614, section 3",
    summary="divides by the mean absolute deviation, balances, and gives hard prompts more weight",
    build=steps_of,
    settings=DgpoSettings,
    preset={"actor_rollout_ref": {"actor": {"loss_agg_mode": "token-mean", "use_kl_loss": False}}},
    doc=__doc__,
)
