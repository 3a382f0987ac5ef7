"""The built-in steps. Values are `[N, K]`; NaN means "not scored" and passes through every step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import SUM, Order, Step, Update
from verl_ext.core.groups import TOLERANCE, Array, Bools, divide
from verl_ext.core.observe import Metrics
from verl_ext.core.typed import limited
from verl_ext.errors import ConfigurationError, listed

_UNDOES: Order = MappingProxyType(
    dict.fromkeys(
        ("balance", "weigh_by_difficulty", "weigh_by_history"),
        "dividing within the group afterwards undoes its factors",
    )
    | {"whiten": "whitening moves groups off their centre, and dividing afterwards undoes it"}
)
_CENTRED: Order = MappingProxyType({"centre": "it divides values that are centred in their group"})
_SUMMED: Order = MappingProxyType({SUM: "it takes one value per trajectory"})


@dataclass(frozen=True)
class Requirement:
    """A reward counts only where the reward `on` is at least `at_least`."""

    on: str
    at_least: float


@dataclass(frozen=True)
class Condition(Step):
    """`r_k <- r_k * 1[r_on >= t]`: an easy reward counts only where the hard one was reached (GDPO, eq. 8).

    Where `on` is not scored, `r_k` is not scored either.
    """

    name: ClassVar[str] = "condition"
    not_after: ClassVar[Order] = MappingProxyType(
        dict.fromkeys(
            (SUM, "centre", "scale_by_std", "scale_by_mad"), "a condition applies to the rewards as they were scored"
        )
    )
    conditions: MappingProxyType[str, Requirement] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for key, needed in self.conditions.items():
            if needed.on == key:
                raise ConfigurationError(f"conditions.{key}.on must name another reward, found {needed.on!r}")

    @classmethod
    def check(cls, given: Mapping[str, Any]) -> str | None:
        """Reject a step without conditions."""
        return None if given.get("conditions") else "it needs conditions={reward: {on: other reward, at_least: number}}"

    def apply(self, values: Array, batch: Batch) -> Array:
        named = {name for key, needed in self.conditions.items() for name in (key, needed.on)}
        if missing := named - set(batch.keys):
            raise ConfigurationError(f"conditions name {listed(missing)}, but the reward keys are {listed(batch.keys)}")
        out: Array = values.copy()
        for key, needed in self.conditions.items():
            column, on = batch.keys.index(key), batch.rewards[:, batch.keys.index(needed.on)]
            missed = (on < needed.at_least) & ~np.isnan(values[:, column])
            out[missed, column] = 0.0
            out[np.isnan(on), column] = np.nan
        return out


@dataclass(frozen=True)
class Centre(Step):
    """`x - mean_g(x)`, exactly 0 in a group without variance and in a group of one.

    A group whose range is at most `1e-6 max(1, |mean|)` has no variance.
    """

    name: ClassVar[str] = "centre"

    def apply(self, values: Array, batch: Batch) -> Array:
        groups = batch.groups
        mean, varies = batch.variation if values is batch.rewards else groups.variation(values)
        centred = values - groups.broadcast(mean)
        return np.where(groups.broadcast(varies) | np.isnan(centred), centred, 0.0)


@dataclass(frozen=True)
class ScaleByStd(Step):
    """`x / (std_g(x) + epsilon)` of centred values, std with n - 1."""

    name: ClassVar[str] = "scale_by_std"
    after: ClassVar[Order] = _CENTRED
    not_after: ClassVar[Order] = _UNDOES
    epsilon: float = limited(1e-6, above=0.0)

    def apply(self, values: Array, batch: Batch) -> Array:
        groups = batch.groups
        return divide(values, groups.broadcast(groups.std(values) + self.epsilon))


@dataclass(frozen=True)
class ScaleByMad(Step):
    """`n_g x / (sum_g |x| + epsilon)` of centred values: divided by the mean absolute deviation (DGPO, DGAE)."""

    name: ClassVar[str] = "scale_by_mad"
    after: ClassVar[Order] = _CENTRED
    not_after: ClassVar[Order] = _UNDOES
    epsilon: float = limited(1e-4, above=0.0)

    def apply(self, values: Array, batch: Batch) -> Array:
        groups = batch.groups
        deviations, count = groups.sum_and_count(np.abs(values))
        # 0 where no value deviates: dividing by a tiny epsilon alone would give infinity.
        scale = np.zeros(deviations.shape)
        np.divide(count, deviations + self.epsilon, out=scale, where=deviations > 0)
        return values * groups.broadcast(scale)


@dataclass(frozen=True)
class WeighAndSum(Step):
    """`sum_k w_k x_k`, plus the KL part of the reward where the batch has one.

    A component that is not scored contributes 0. A row without a scored component is not scored.
    """

    name: ClassVar[str] = SUM
    not_after: ClassVar[Order] = MappingProxyType({SUM: "there is already one value per trajectory"})
    weights: tuple[float, ...] | None = None
    """One per component; default: 1 each."""

    def apply(self, values: Array, batch: Batch) -> Array:
        columns = values.shape[1]
        given = (1.0,) * columns if self.weights is None else self.weights
        if len(given) != columns:
            raise ConfigurationError(f"{len(given)} weights for {columns} reward keys: {listed(batch.keys)}")
        if given == (1.0,) and batch.kl_reward is None:
            return values
        weights = np.array(given)
        total: Array = values @ weights
        unscored: Bools = np.isnan(total)
        if np.any(unscored):
            missing = np.isnan(values)
            total = np.where(missing, 0.0, values) @ weights
            unscored = np.asarray(missing.all(axis=1))
        if batch.kl_reward is not None:
            total = total + batch.kl_reward
        total[unscored] = np.nan
        return total[:, None]


@dataclass(frozen=True)
class Whiten(Step):
    """`(x - mean(x)) / (std(x) + epsilon)` over the whole batch, by sequences or by tokens.

    `over="sequence"`: over trajectories, std with n - 1. `over="token"`: every trajectory counts once per token, and
    the divisor is `sqrt(var + 1e-8)`, as in verl's `masked_whiten`.

    Where every group is centred (its mean is 0 to within 1e-6), groups without variance get exactly 0, also where two
    rewards cancel (`r2 = C - r1`). The mean over trajectories is then 0 up to rounding and is not subtracted, so these
    values stay 0. Over tokens the mean is not 0 in general and shifts them, as in verl.
    """

    name: ClassVar[str] = "whiten"
    after: ClassVar[Order] = _SUMMED
    not_after: ClassVar[Order] = MappingProxyType({"balance": "dividing by the batch's std undoes its factor"})
    over: Literal["sequence", "token"] = "sequence"
    epsilon: float = limited(1e-6, above=0.0)

    @classmethod
    def check(cls, given: Mapping[str, Any]) -> str | None:
        """Reject an epsilon over tokens, where 1e-8 is added to the variance as in verl."""
        unused = given.get("over", cls.over) == "token" and "epsilon" in given
        return "epsilon has no effect with over=token, whose divisor is sqrt(var + 1e-8)" if unused else None

    def update(self, values: Array, batch: Batch, state: Any) -> Update:
        values, centred = _without_rounding(values, batch)
        x = values.ravel()
        weights = batch.lengths.repeat(values.shape[1]) if self.over == "token" else np.ones(len(x))
        unscored = np.isnan(x)
        if unscored.any():
            x, weights = x[~unscored], weights[~unscored]
        total = float(weights.sum())
        zero_mean = not total or (centred and self.over == "sequence")
        mean = 0.0 if zero_mean else float((weights * x).sum()) / total
        variance = float((weights * np.square(x - mean)).sum()) / (total - 1) if total > 1 else 0.0
        std = math.sqrt(variance)
        divisor = math.sqrt(variance + 1e-8) if self.over == "token" else std + self.epsilon
        whitened = (values - mean) / divisor if divisor else np.where(np.isnan(values), values, 0.0)
        return Update(whitened if total else values, metrics={"whiten_shift": mean, "whiten_std": std})


@dataclass(frozen=True)
class Balance(Step):
    """`x * z`: compensates for the groups without variance in the mean of the loss (DGPO, 3.2).

    `over="token"`: `z = sum_all len / sum_valid len`; `over="sequence"`: `z = N / N_valid`. A group is valid if its
    values vary; `z = 1` when none is. z is logged as `balance_z`, and as `zero_mask_ratio` as in the authors' code and
    TRL; `dead_share` is the share of rows in groups that are not valid.
    """

    name: ClassVar[str] = "balance"
    after: ClassVar[Order] = _SUMMED
    over: Literal["token", "sequence"] = "token"

    def update(self, values: Array, batch: Batch, state: Any) -> Update:
        share = batch.lengths if self.over == "token" else np.ones(len(values))
        live = batch.groups.broadcast(_live(values, batch))
        # Not np.dot: BLAS starts threads of its own for it, which slow torch's down.
        valid = float(np.add.reduce(share[live]))
        z = float(np.add.reduce(share)) / valid if valid else 1.0
        dead_share = 1.0 - float(np.count_nonzero(live)) / len(live) if len(live) else 0.0
        return Update(values * z, metrics={"balance_z": z, "zero_mask_ratio": z, "dead_share": dead_share})


@dataclass(frozen=True)
class WeighByDifficulty(Step):
    """`x * lambda_g`, `lambda = B_v softmax(-acc_g / T)` over the `B_v` valid groups, 1 elsewhere (DGPO, DQW).

    `acc_g` is the group's mean accuracy. A valid group with accuracy 0 varies only in another reward. It counts as
    accuracy 1, the least weight; so does a group without a scored accuracy.
    """

    name: ClassVar[str] = "weigh_by_difficulty"
    needs_accuracy: ClassVar[bool] = True
    after: ClassVar[Order] = _SUMMED
    dqw_temp: float = limited(2.0, above=0.0)
    """Temperature T."""
    renamed: ClassVar[Mapping[str, str]] = MappingProxyType({"temperature": "dqw_temp"})

    def update(self, values: Array, batch: Batch, state: Any) -> Update:
        live = _live(values, batch)
        accuracy = batch.groups.mean(batch.accuracy_for(self.name))
        solved = np.where(accuracy > 0, accuracy, 1.0)[live]  # NaN is not above 0
        weights = np.ones(len(live))
        metrics: Metrics = {
            "valid_groups": float(len(solved)),
            "all_right_groups": float(np.count_nonzero(accuracy >= 1)),
            "all_wrong_groups": float(np.count_nonzero(accuracy <= 0)),
        }
        if len(solved):
            lam = np.exp((np.minimum.reduce(solved) - solved) / self.dqw_temp)
            lam *= len(lam) / np.add.reduce(lam)
            weights[live] = lam
            metrics |= {
                "difficulty_weight_max": float(np.maximum.reduce(lam)),
                "difficulty_weight_min": float(np.minimum.reduce(lam)),
            }
        return Update(values * batch.groups.broadcast(weights)[:, None], metrics=metrics)


def _without_rounding(values: Array, batch: Batch) -> tuple[Array, bool]:
    """The values, and whether all groups are centred up to rounding: groups without variance then get exactly 0."""
    mean, varies = batch.groups.variation(values)
    if (np.abs(mean) > TOLERANCE * np.fmax.reduce(np.abs(values), axis=None, initial=1.0)).any():
        return values, False
    return np.where(batch.groups.broadcast(varies) | np.isnan(values), values, 0.0), True


def _live(values: Array, batch: Batch) -> Bools:
    """`[G]` whether the group's single value varies."""
    if values.shape[1] != 1:
        raise ConfigurationError(
            f"this step takes one value per trajectory, found {values.shape[1]}: put weigh_and_sum first"
        )
    return batch.groups.varies(values[:, 0])
