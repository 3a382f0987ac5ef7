"""GRPO, arXiv 2402.03300: the base which HA-DW reweighs. verl's own `grpo` serves a run without reweighting.

    A_i = (r_i - mean_g(r)) / (std_g(r) + 1e-6)        std with n - 1

`algorithm.norm_adv_by_std_in_grpo=False` leaves the division out. A group of one has advantage 0 here, the raw reward
in verl; so has a group with a range of at most 1e-6 max(1, |mean|), whose float32 rounding verl divides by its std.
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
    return Chain((*centre, ScaleByStd()) if settings.norm_by_std else centre)
