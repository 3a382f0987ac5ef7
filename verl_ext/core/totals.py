"""Steps after the sum: they compare groups, or look at the whole batch. Values are `[N, 1]`, NaN "not scored"."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import COMPARED, Order, Step, StepResult
from verl_ext.core.groups import TOLERANCE, Array, divide
from verl_ext.core.metrics import Metrics
from verl_ext.core.steps import single, without_rounding
from verl_ext.core.turns import Turns
from verl_ext.core.typed import bounded


@dataclass(frozen=True)
class LengthPenalty(Step):
    """`x - weight (len - shortest) / (longest - shortest)` for the right responses to a prompt, before centering.

    `len` is a response's number of tokens in the loss; shortest and longest are those of the prompt's right responses,
    whose accuracy is above `above`. Wrong responses keep their value; so do the right ones of a prompt if there is one,
    or if all have one length. One that is not scored, or has no token in the loss, has no part. By turn a response
    earns the difference at its last turn, so that it is part of the returns of its earlier turns.

    Kimi k1.5 (2501.12599, 2.3.3) has another form, in which wrong responses lose as well.

    >>> batch = Batch.of([[1.0], [1.0], [1.0], [0.0]], ["g"] * 4, lengths=[2, 4, 6, 9], accuracy=[1, 1, 1, 0])
    >>> LengthPenalty(weight=0.5).apply(batch.returns, batch)[:, 0]
    array([1.  , 0.75, 0.5 , 0.  ])
    """

    name: ClassVar[str] = "length_penalty"
    needs_accuracy: ClassVar[bool] = True
    after: ClassVar[Order] = {"weighted_sum": "it lowers the sum"}
    not_after: ClassVar[Order] = {COMPARED: "values that it lowers must be compared afterwards"}
    weight: float = bounded(dataclasses.MISSING, above=0.0)
    above: float = bounded(0.5, low=0.0, high=1.0)

    def apply(self, values: Array, batch: Batch) -> Array:
        turns, prompts = batch.turns, batch.prompts
        tokens = np.bincount(turns.response, batch.lengths)[turns.response]
        right = batch.accuracy_for(self.name) > self.above + TOLERANCE
        length = np.where(right & (tokens > 0) & ~np.isnan(single(values)), tokens, np.nan)
        shortest = np.fmin.reduceat(length[prompts.order], prompts.starts)
        longest = np.fmax.reduceat(length[prompts.order], prompts.starts)
        lost = divide(length - prompts.broadcast(shortest), prompts.broadcast(longest - shortest))
        earned = -self.weight * np.nan_to_num(lost)
        return values + Turns(turns.number, (0,), turns.discount).returns(earned[:, None])


@dataclass(frozen=True)
class Whiten(Step):
    """`(x - mean(x)) / (std(x) + epsilon)` over the whole batch, by sequences or by tokens.

    `over="sequence"`: over trajectories, std with n - 1; each of T turns counts 1 / T. `over="token"`: every trajectory
    or turn counts once per token, and the divisor is `sqrt(var + 1e-8)`, as in verl's `masked_whiten`.

    Where every group is centered (see `without_rounding`), nothing is subtracted over sequences: the mean is 0 up to
    rounding, and groups without variance stay 0. By turn nothing ever is, because the mean would depend on the decision
    to stop. Over tokens the mean shifts all values, as in verl.
    """

    name: ClassVar[str] = "whiten"
    not_after: ClassVar[Order] = {"balance": "dividing by the batch's std undoes its factor"}
    undoes: ClassVar[Order] = {"divide_by_batch_std": "dividing by the batch's std again undoes it"}
    over: Literal["sequence", "token"] = "sequence"
    epsilon: float = bounded(1e-6, above=0.0, only_with={"over": ("sequence",)})

    def transform(self, values: Array, batch: Batch, state: Any) -> StepResult:
        values, centered = without_rounding(values, batch)
        column = single(values)
        scored = ~np.isnan(column)
        x = column[scored]
        weights = (batch.lengths if self.over == "token" else batch.turns.response_weights(scored))[scored]
        total = float(weights.sum().round(6))  # thirds add up to a whole number only up to rounding
        if not total:
            return StepResult(values, metrics={"whiten_shift": 0.0, "whiten_std": 0.0})
        kept = self.over == "sequence" and (centered or not batch.turns.last.all())
        mean = 0.0 if kept else float((weights * x).sum()) / total
        variance = float((weights * np.square(x - mean)).sum()) / max(total - 1, 1.0)
        std = math.sqrt(variance)
        divisor = math.sqrt(variance + 1e-8) if self.over == "token" else std + self.epsilon
        return StepResult((values - mean) / divisor, metrics={"whiten_shift": mean, "whiten_std": std})


@dataclass(frozen=True)
class Balance(Step):
    """`x * z`: compensates for the groups without variance in the mean of the loss (DGPO, 3.2).

    `over="token"`: `z = sum_all len / sum_valid len`; `over="sequence"`: `z = B / B_valid`, rows of verl's batch, over
    which the loss averages. A group is valid if its values vary, a row with several turns if one of them is in a valid
    group; `z = 1` when none is. z is logged as `balance_z` (`zero_mask_ratio` in the authors' code and TRL);
    `zero_variance_fraction` is the share of rows, trajectories or turns, that are not valid.
    """

    name: ClassVar[str] = "balance"
    not_after: ClassVar[Order] = {"balance": "its factor would count twice"}
    over: Literal["token", "sequence"] = "token"

    def transform(self, values: Array, batch: Batch, state: Any) -> StepResult:
        live = batch.groups.broadcast(batch.groups.varies(single(values)))
        share = batch.lengths
        if self.over == "sequence":
            share, row = batch.outputs, (batch.outputs > 0).cumsum()
            live = (np.bincount(row, live) > 0)[row]
        valid = float(share[live].sum())
        z = float(share.sum()) / valid if valid else 1.0
        zero_variance_fraction = float((~live).mean()) if len(live) else 0.0
        return StepResult(values * z, metrics={"balance_z": z, "zero_variance_fraction": zero_variance_fraction})


@dataclass(frozen=True)
class WeightByDifficulty(Step):
    """`x * lambda_g`, `lambda = B_v softmax(-acc_g / T)` over the `B_v` valid prompts, 1 elsewhere (DGPO, DQW).

    `acc_g` is the prompt's mean accuracy. A prompt is valid if its values vary, by turn those of one of its groups. One
    that is valid with accuracy 0 varies only in another reward. It counts as accuracy 1, the least weight; so does one
    without a scored accuracy.
    """

    name: ClassVar[str] = "weight_by_difficulty"
    needs_accuracy: ClassVar[bool] = True
    dqw_temp: float = bounded(2.0, low=1e-6)
    """Temperature T."""

    def transform(self, values: Array, batch: Batch, state: Any) -> StepResult:
        varies = batch.groups.broadcast(batch.groups.varies(single(values)))
        live = batch.prompts.sum(varies.astype(np.float64)) > 0
        accuracy = batch.prompts.mean(batch.accuracy_for(self.name))
        solved = np.where(accuracy > 0, accuracy, 1.0)[live]  # NaN is not above 0
        weights = np.ones(len(live))
        metrics: Metrics = {
            "valid_groups": float(len(solved)),
            "all_correct_groups": float((accuracy >= 1).sum()),
            "all_incorrect_groups": float((accuracy <= 0).sum()),
        }
        if len(solved):
            lam = np.exp((solved.min() - solved) / self.dqw_temp)
            lam *= len(lam) / lam.sum()
            weights[live] = lam
            metrics |= {"difficulty_weight_max": float(lam.max()), "difficulty_weight_min": float(lam.min())}
        return StepResult(values * batch.prompts.broadcast(weights)[:, None], metrics=metrics)


@dataclass(frozen=True)
class WeightByFocal(Step):
    """`x (1 - p_g)^gamma`, `p_g` the prompt's mean accuracy: easy prompts count less (F-GRPO).

    A prompt without a scored accuracy keeps its values.
    """

    name: ClassVar[str] = "weight_by_focal"
    needs_accuracy: ClassVar[bool] = True
    gamma: float = bounded(1.0, low=0.0)
    """How much easy prompts count less; 0: not at all."""

    def apply(self, values: Array, batch: Batch) -> Array:
        accuracy = batch.prompts.mean(batch.accuracy_for(self.name))
        weights: Array = np.where(np.isnan(accuracy), 1.0, (1.0 - accuracy) ** self.gamma)
        return values * batch.prompts.broadcast(weights)[:, None]
