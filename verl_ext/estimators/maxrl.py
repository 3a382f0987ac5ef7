r"""MaxRL: maximum-likelihood reinforcement learning, arXiv 2602.02710.

The centred reward is divided by the group's mean reward:

    A_i = (r_i - mean_g(r)) / (mean_g(r) + epsilon)        r_i >= 0: the score, or sum_k w_k r_ik

With rewards of 0 and 1 the mean is the pass rate p, and a prompt counts about 1/p times as much as in REINFORCE: the
gradient is an unbiased estimate of that of the likelihood of a right answer, truncated at the group's size.

Degenerate cases: a group of one, one whose mean is 0, and one with a range of at most 1e-6 max(1, |mean|) have
advantage 0. In the authors' code the mean of a group of one is 0, so that its reward is divided by epsilon. A negative
reward is an error, because the mean could be 0 or negative: map it, for example from [-1, 1] to [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from verl_ext.core.chain import Chain
from verl_ext.core.steps import Centre, DivideByMean, WeighAndSum
from verl_ext.core.typed import same_as
from verl_ext.errors import Complaint
from verl_ext.settings import Settings


@dataclass(frozen=True)
class MaxrlSettings:
    """`algorithm.maxrl`."""

    epsilon: float = same_as(DivideByMean, "epsilon")
    """Added to the mean; above 0."""


SECTION = MaxrlSettings


def rule(settings: Settings, select: Callable[[str], Any]) -> Iterator[Complaint]:
    """Complain about settings that make rewards negative; `select` reads an entry of verl's configuration."""
    penalty = "reward.reward_kwargs.overlong_buffer_cfg.enable"
    weights = settings.rewards.weights or ()
    if any(weight < 0 for weight in weights):
        yield Complaint(
            f"maxrl needs rewards of at least 0, which algorithm.rewards.weights={list(weights)} may make negative: "
            "give weights of at least 0"
        )
    if select("reward.reward_manager.name") == "dapo" and select(penalty):
        yield Complaint(f"maxrl needs rewards of at least 0, and a penalty makes them negative: set {penalty}=False")


def maxrl(settings: Settings) -> Chain:
    """Weigh and sum, divide by the group's mean, centre.

    >>> from verl_ext.core.batch import Batch
    >>> batch = Batch.of([[1], [0], [0], [0], [1], [1]], ["a", "a", "a", "a", "b", "b"])
    >>> maxrl(Settings())(batch).advantages.round(3)
    array([ 3., -1., -1., -1.,  0.,  0.])
    """
    section = settings.of("maxrl", MaxrlSettings)
    return Chain((WeighAndSum(settings.rewards.weights), DivideByMean(section.epsilon), Centre()))
