r"""GD2PO, arXiv 2606.16771: GDPO without the responses whose rewards pull in different directions.

    A_ik = (r_ik - mean_g(r_k)) / (std_g(r_k) + epsilon)        reward k of response i to prompt g, std with n - 1
    response i conflicts if one w_k A_ik is positive and another negative; |A_ik| <= 1e-6 is rounding, without a sign
    conflict=hard drops every response that conflicts
    conflict=snr  drops those with |sum_k w_k A_ik| / (sum_k |w_k A_ik| + 1e-8) < tau
    S_i  = c_g sum_k w_k A_ik                                   c_g the share of the group that is kept
    A_i  = (S_i - mean(S)) / sqrt(var(S) + 1e-8)                over the tokens of the kept responses; 0 for the others

`whiten=sequence` takes the last mean and std over the kept responses, as `gdpo` does; `none` leaves that out.

Degenerate cases: a reward whose range in a group is at most 1e-6 max(1, |mean|) does not vary and adds 0 there. A group
without any variance has S = 0, conflicts nowhere, and is kept: whitening shifts it with the others, as in the authors'
code. A reward that has weight 0 or is not scored has no part in a conflict. With one reward nothing conflicts. If every
response is dropped, all advantages are 0. A response without tokens in the loss counts as any other, in the conflict
and in the share; in the authors' code it never conflicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_ext.core.chain import Chain, Step
from verl_ext.core.steps import Centre, DropConflicts, ScaleByStd, WeighAndSum
from verl_ext.core.totals import Whiten
from verl_ext.core.typed import same_as
from verl_ext.settings import Settings


@dataclass(frozen=True)
class Gd2poSettings:
    """`algorithm.gd2po`."""

    conflict: Literal["hard", "snr"] = "hard"
    """Which responses are dropped: `hard`, every one that conflicts; `snr`, those whose rewards nearly cancel."""
    tau: float = same_as(DropConflicts, "tau")
    """The limit of `snr`; the authors train with 0.2, 0.5 and 0.8."""
    whiten: Literal["token", "sequence", "none"] = "token"
    """Over what the kept responses are whitened: `token` as the authors do, `sequence`, `none`."""
    epsilon: float = same_as(Whiten, "epsilon", only_with={})
    """Added to the std; above 0."""


SECTION = Gd2poSettings


def gd2po(settings: Settings) -> Chain:
    """Normalise each reward in its group, drop the conflicts, weigh and sum, whiten what is kept.

    >>> from verl_ext.core.batch import Batch
    >>> correctness, length = [1, 0, 0, 1], [1, 1, 0, 0]
    >>> batch = Batch.of(list(zip(correctness, length)), ["a"] * 4, keys=("correctness", "length"))
    >>> gd2po(Settings())(batch).advantages.round(3)
    array([ 0.707,  0.   , -0.707,  0.   ])
    """
    section = settings.of("gd2po", Gd2poSettings)
    steps: list[Step] = [Centre()]
    if settings.norm_by_std:
        steps.append(ScaleByStd(section.epsilon))
    steps += [
        DropConflicts(section.conflict, section.tau, settings.rewards.weights),
        WeighAndSum(settings.rewards.weights),
    ]
    if section.whiten == "token":
        steps.append(Whiten("token"))
    elif section.whiten == "sequence":
        steps.append(Whiten("sequence", section.epsilon))
    return Chain(tuple(steps))
