"""GRPO, arXiv 2402.03300: the default base of HA-DW. Without reweighting, use verl's own `grpo`.

    A_i = (r_i - mean_g(r)) / (std_g(r) + 1e-6)        std with n - 1

`algorithm.norm_adv_by_std_in_grpo=False` leaves out the division. A group of one has advantage 0; in verl it has its
raw reward. A group with a range of at most 1e-6 max(1, |mean|) has advantage 0; verl divides its float32 rounding by
its std.
"""

from __future__ import annotations

from verl_ext.core.chain import Chain
from verl_ext.core.steps import Centre, ScaleByStd, WeighAndSum
from verl_ext.settings import Settings


def grpo(settings: Settings) -> Chain:
    """`A = (r - mean_g(r)) / (std_g(r) + 1e-6)`.

    >>> from verl_ext.core.batch import Batch
    >>> grpo(Settings())(Batch.of([[1], [0]], ["a", "a"])).advantages.round(4)
    array([ 0.7071, -0.7071])
    """
    centre = (WeighAndSum(settings.rewards.weights), Centre())
    return Chain((*centre, ScaleByStd(1e-6)) if settings.norm_by_std else centre)
