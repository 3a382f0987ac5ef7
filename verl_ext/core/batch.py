"""The batch as an estimator sees it: the rewards of segments, which are trajectories or their turns."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from verl_ext.core.groups import TOLERANCE, Array, Groups, label_text
from verl_ext.core.turns import Turns
from verl_ext.errors import ConfigurationError, DataError, listed, unknown

# The square of a weighted reward is then at most (1e30 * 1e30)^2 = 1e120, so that sums of squares stay finite.
LARGEST_REWARD = 1e30

SCORE = "score"
"""The reward that every batch has: the one that the trainer uses if no reward is named."""

# Floats count exactly up to this number.
LARGEST_COUNT = 2.0**53

Counts = Sequence[float] | Array


@dataclass(frozen=True)
class Condition:
    """Condition an easy reward on a hard one: `r_k <- r_k 1[r_j >= t]` (GDPO, eq. 8).

    `reward` names `r_j`, and `at_least` is `t`. Where `r_j` is not scored, `r_k` is not scored either.
    """

    reward: str
    at_least: float

    def met(self, values: Array) -> Array:
        """Return `[N]` 1 where the condition is met, 0 where it is not met, NaN where `r_j` is not scored.

        Rewards arrive as float32, so a value up to `1e-6 max(1, |t|)` below the threshold meets the condition.

        >>> Condition("correctness", 0.3).met(np.array([np.float32(0.3), 0.2, np.nan]))
        array([ 1.,  0., nan])
        """
        reached = values >= self.at_least - TOLERANCE * max(1.0, abs(self.at_least))
        return np.where(np.isnan(values), np.nan, reached)


@dataclass(frozen=True)
class Batch:
    """Segments with their rewards. `Batch.of` makes a batch. NaN means "not scored".

    A segment is a trajectory, or with per-turn rewards one turn of a trajectory. In the shapes of arrays, `N` is the
    number of segments, `K` of columns, `G` of groups and `T` of trajectories.

    The weight of a column is a product: the weight of its reward, `reward_weights`, times the weight of the criterion
    within its rubric, `rubric_weights`. `weights` has the product for each segment, and `group_weights` for each group.

    >>> batch = Batch.of([[1.0], [0.0]], ["g", "g"])
    >>> batch.rewards.shape, batch.keys, len(batch.groups)
    ((2, 1), ('score',), 1)
    """

    raw: Array
    """`[N, K]` the rewards as the reward function returned them, for metrics and dumps. Read-only."""
    rewards: Array
    """`[N, K]` the rewards after the conditions, for custom steps. Read-only."""
    returns: Array
    """`[N, K]` the input of the first step: the rewards, or with per-turn rewards the returns. Read-only."""
    keys: tuple[str, ...]
    """`K` names of the columns: the rewards, and `rubric[0]`, `rubric[1]`, ... for the criteria of a rubric."""
    reward_of_column: tuple[str, ...]
    """`K` the reward of each column, for example `rubric` for `rubric[0]`."""
    reward_names: tuple[str, ...]
    """The names of the rewards, in the order of their columns."""
    reward_weights: Array
    """One weight per reward: `algorithm.rewards.weights`, or 1 each."""
    criterion_weights: Array | None
    """`[N, K]` the weight of each criterion within its rubric, and 1 for other columns. The criteria of a rubric and
    their weights are equal for all segments of a prompt. None: there is no rubric."""
    conditions: Mapping[str, Condition]
    """The conditions of conditioned rewards, by key."""
    groups: Groups
    """The segments that are compared: the trajectories of a prompt, or with per-turn rewards their turns of the same
    number."""
    prompts: Groups
    """The segments of each prompt."""
    turns: Turns
    """The turn of each segment. Without per-turn rewards each trajectory has one turn."""
    accuracy: Array | None
    """`[N]` in [0, 1], or NaN if it is not known, for the steps that read how often a prompt is solved."""
    kl_reward: Array | None
    """`[N]` the KL term of the reward, which is added to the sum of the rewards only.

    If a trajectory has several rows of verl's batch, the trainers pass the KL term of the last one, although `lengths`
    counts the tokens of all."""
    outputs: Array
    """`[N]` number of rows of verl's batch of each trajectory, or with per-turn rewards those that begin with the
    turn."""
    lengths: Array
    """`[N]` number of tokens in the loss of each segment. A trajectory counts the tokens of all its rows."""
    fields: Mapping[str, Sequence[Any]]
    """`N` entries of each field of verl's batch, such as `data_source`, that a step has in `needs_fields`."""

    def accuracy_for(self, step: str) -> Array:
        """Return `[N]` each trajectory's accuracy at its last turn, and NaN at earlier turns.

        So a mean counts each trajectory once.
        """
        if self.accuracy is None:
            raise ConfigurationError(
                f"The step {step!r} needs an accuracy in [0, 1] for each trajectory, but the batch has no accuracy. "
                "Pass accuracy=[...] to Batch.of."
            )
        return np.where(self.turns.last, self.accuracy, np.nan)

    def field(self, name: str) -> Sequence[Any]:
        """Return the `N` entries of a field, or raise an error that says how a step requests it."""
        if name not in self.fields:
            raise ConfigurationError(
                f"A step reads the field {name!r} of verl's batch without declaring it. Add {name!r} to the "
                "`needs_fields` of the step."
            )
        return self.fields[name]

    def trajectory_rewards(self, *, raw: bool = False) -> Array:
        """Return `[T, K]` the reward of each trajectory, and with `raw` its reward before the conditions.

        A per-turn reward is the return of the first turn, which includes the rewards of all turns.
        """
        turns = self.turns
        if turns.one_per_trajectory:
            return self.raw if raw else self.returns
        returns = turns.returns(self.raw) if raw else self.returns
        is_per_turn = np.isin(np.arange(len(self.keys)), turns.columns)
        at_first_turn = returns[turns.number == 0]
        at_last_turn = returns[turns.last]
        return np.where(is_per_turn, at_first_turn, at_last_turn)

    def with_weights(self, weights: Sequence[float]) -> Batch:
        """Return the batch with one weight per reward, in the order of `reward_names`."""
        names = self.reward_names
        if len(weights) != len(names):
            raise ConfigurationError(
                f"There are {len(weights)} weights for the {len(names)} rewards {listed(names)}. Set one weight per "
                "reward."
            )
        return replace(self, reward_weights=np.array(weights, dtype=np.float64))

    @cached_property
    def weights(self) -> Array:
        """`[N, K]` the weight of each column: the weight of its reward times the column's `rubric_weights`."""
        weight_of_reward = dict(zip(self.reward_names, self.reward_weights.tolist(), strict=True))
        weight_of_column = np.array([weight_of_reward[reward] for reward in self.reward_of_column])
        return weight_of_column * self.rubric_weights

    @cached_property
    def group_weights(self) -> Array:
        """`[G, K]` the weight of each column in each group."""
        first_segment_of_group = self.groups.order[self.groups.starts]
        return self.weights[first_segment_of_group]

    @cached_property
    def rubric_weights(self) -> Array:
        """`[N, K]` the same as `criterion_weights`, or 1 everywhere if there is no rubric."""
        if self.criterion_weights is None:
            return np.ones(self.raw.shape)
        return self.criterion_weights

    def by_reward(self) -> Batch:
        """Return the batch with one column per reward. A rubric becomes the weighted sum of its criteria."""
        criterion_weights = self.criterion_weights
        if criterion_weights is None:
            return self

        def rubric_totals(values: Array) -> Array:
            scored_columns = self.reward_sums(np.where(np.isnan(values), 0.0, 1.0))
            totals = self.reward_sums(np.nan_to_num(values) * criterion_weights)
            return np.where(scored_columns == 0, np.nan, totals)

        return replace(
            self,
            raw=rubric_totals(self.raw),
            rewards=rubric_totals(self.rewards),
            returns=rubric_totals(self.returns),
            keys=self.reward_names,
            reward_of_column=self.reward_names,
            criterion_weights=None,
        )

    def reward_sums(self, values: Array) -> Array:
        """Sum the columns of each rubric: `[N, K] -> [N, rewards]`."""
        reward_of_column = np.array(self.reward_of_column)
        sums = [values[:, reward_of_column == key].sum(axis=1) for key in self.reward_names]
        return np.stack(sums, axis=1)

    @classmethod
    def of(
        cls,
        rewards: Sequence[Sequence[float]] | Array,
        labels: Sequence[Hashable],
        *,
        prompts: Groups | None = None,
        turns: Turns | None = None,
        keys: Sequence[str] = (SCORE,),
        reward_of_column: Sequence[str] | None = None,
        criterion_weights: Array | None = None,
        conditions: Mapping[str, Condition] | None = None,
        lengths: Counts | None = None,
        accuracy: Counts | None = None,
        kl_reward: Counts | None = None,
        outputs: Counts | None = None,
        fields: Mapping[str, Sequence[Any]] | None = None,
    ) -> Batch:
        """Check the shapes and that the rewards are finite, apply the conditions, then build the batch.

        `labels` are the prompts' uids, one per segment. Pass `prompts` if the segments are already grouped. With
        `turns`, each turn is one segment, and the values of a trajectory are repeated for each of its turns. `lengths`,
        the number of tokens in the loss, and `outputs` default to 1 each. Each reward has weight 1; `with_weights`
        changes that.
        """
        size = len(labels)
        raw = _shaped("rewards", rewards, (size, len(keys))).copy()
        check_finite(raw, keys, labels)
        conditioned = _apply_conditions(raw, keys, conditions) if conditions else raw
        prompts = _prompts(prompts, labels)
        turns = _turns(turns, size)
        returns = conditioned if turns.one_per_trajectory else turns.returns(conditioned)
        reward_of_column = _reward_of_column(reward_of_column, keys)
        reward_names = tuple(dict.fromkeys(reward_of_column))
        for values in (raw, conditioned, returns):
            values.setflags(write=False)
        return cls(
            raw=raw,
            rewards=conditioned,
            returns=returns,
            keys=tuple(keys),
            reward_of_column=reward_of_column,
            reward_names=reward_names,
            reward_weights=np.ones(len(reward_names)),
            criterion_weights=_criterion_weights(criterion_weights, raw.shape),
            conditions=conditions or {},
            groups=_groups(prompts, turns),
            prompts=prompts,
            turns=turns,
            accuracy=_accuracy(accuracy, size),
            kl_reward=_kl_reward(kl_reward, conditioned, labels),
            outputs=_counts("outputs", outputs, size),
            lengths=_counts("lengths", lengths, size),
            fields=fields or {},
        )


def _prompts(prompts: Groups | None, labels: Sequence[Hashable]) -> Groups:
    """Return the groups of segments by prompt, which the labels determine by default."""
    if prompts is None:
        return Groups.of(labels)
    _require_length("prompts", len(prompts.ids), "rows", len(labels))
    return prompts


def _turns(turns: Turns | None, size: int) -> Turns:
    """Return the turns of `size` segments, by default one for each trajectory."""
    if turns is None:
        return Turns(np.zeros(size, dtype=np.intp))
    _require_length("turns", len(turns.number), "rows", size)
    return turns


def _reward_of_column(rewards: Sequence[str] | None, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the reward of each column, by default the column itself."""
    if rewards is None:
        return tuple(keys)
    _require_length("reward_of_column", len(rewards), "columns", len(keys))
    return tuple(rewards)


def _criterion_weights(weights: Array | None, shape: tuple[int, ...]) -> Array | None:
    return None if weights is None else _shaped("criterion_weights", weights, shape)


def _groups(prompts: Groups, turns: Turns) -> Groups:
    """Return the groups of segments that are compared: those of the same prompt and the same turn."""
    if turns.one_per_trajectory:
        return prompts
    return Groups.of(zip(prompts.ids.tolist(), turns.number.tolist(), strict=True))


def _apply_conditions(raw: Array, keys: Sequence[str], conditions: Mapping[str, Condition]) -> Array:
    """Return a copy of the rewards `[N, K]` in which a reward is 0 where its condition is not met."""
    named = {*conditions, *(condition.reward for condition in conditions.values())}
    for name in named - {*keys}:
        raise ConfigurationError(f"algorithm.rewards.conditions: {unknown('reward', name, keys)}.")
    conditioned: Array = raw.copy()
    for key, condition in conditions.items():
        easy = raw[:, keys.index(key)]
        met = condition.met(raw[:, keys.index(condition.reward)])
        is_scored = ~np.isnan(easy) & ~np.isnan(met)
        kept = np.where(met > 0, easy, 0.0)
        conditioned[:, keys.index(key)] = np.where(is_scored, kept, np.nan)
    return conditioned


def check_finite(matrix: Array, keys: Sequence[str], labels: Sequence[Hashable]) -> None:
    """Raise for an infinite or huge reward, naming the reward and the label. NaN is allowed and means "not scored"."""
    broken = np.abs(matrix) > LARGEST_REWARD
    if broken.any():
        row, column = np.argwhere(broken)[0]
        count = int(broken.sum())
        label = labels[row]
        raise DataError(
            f"The reward {keys[column]!r} of {label_text(label)} is {matrix[row, column]} (row {row}, "
            f"{count} such values in total). Return a finite reward with an absolute value of at most "
            f"{LARGEST_REWARD:g}, or NaN for a response that is not scored.",
            label=label,
        )


def unit_accuracy(values: Array, labels: Sequence[Hashable], *, key: str, threshold: float | None) -> Array:
    """Return the accuracy in [0, 1]. With a threshold, values above it are 1 and the rest are 0. NaN stays NaN.

    >>> unit_accuracy(np.array([-1.0, 1.0]), ["a", "a"], key="score", threshold=0.0)
    array([0., 1.])
    """
    check_finite(values[:, None], [key], labels)
    if threshold is not None:
        margin = TOLERANCE * max(1.0, abs(threshold))  # float32 may put a score just above the threshold it equals
        return np.where(np.isnan(values), np.nan, values > threshold + margin)
    scored = values[~np.isnan(values)]
    outside = (scored < -TOLERANCE) | (scored > 1 + TOLERANCE)
    if outside.any():
        raise ConfigurationError(
            f"The accuracy must lie in [0, 1], but reward {key!r} ranges over [{scored.min():g}, {scored.max():g}]. "
            "Set algorithm.rewards.accuracy_key to another component, or set algorithm.rewards.accuracy_threshold=t to "
            "count values above t as correct (t=0 for a reward function that returns -1 and 1)."
        )
    return np.clip(values, 0.0, 1.0)


def _kl_reward(values: Counts | None, rewards: Array, labels: Sequence[Hashable]) -> Array | None:
    """Return `[N]` the KL term of the reward, if there is one.

    Raise unless it is finite in every segment that has a scored reward.
    """
    if values is None:
        return None
    kl_reward = _shaped("kl_reward", values, (len(rewards),))
    is_valid = np.abs(kl_reward) <= LARGEST_REWARD  # False for NaN
    has_scored_reward = ~np.isnan(rewards).all(axis=1)
    broken = np.flatnonzero(~is_valid & has_scored_reward)
    if len(broken):
        row = int(broken[0])
        raise DataError(
            f"The KL term of the reward of {label_text(labels[row])} is {kl_reward[row]} (row {row}, {len(broken)} "
            "such rows in total), expected a finite number. Check the log-probabilities of the policy and of the "
            "reference model, and the score, for NaN and infinite values.",
            label=labels[row],
        )
    return kl_reward


def _require_length(name: str, length: int, unit: str, expected: int) -> None:
    if length != expected:
        raise DataError(f"{name} has {length} entries for {expected} {unit}. Pass one entry for each of the {unit}.")


def _counts(name: str, values: Counts | None, size: int) -> Array:
    """Return `[N]` numbers in [0, LARGEST_COUNT], 1 each by default, or raise."""
    if values is None:
        return np.ones(size)
    column = _shaped(name, values, (size,))
    is_valid = (column >= 0) & (column <= LARGEST_COUNT)
    if not is_valid.all():
        raise _outside(name, column[~is_valid], LARGEST_COUNT)
    return column


def _accuracy(values: Counts | None, size: int) -> Array | None:
    """Return `[N]` numbers in [0, 1] or NaN, None without an accuracy, or raise."""
    if values is None:
        return None
    column = _shaped("accuracy", values, (size,))
    is_valid = (column >= 0) & (column <= 1) | np.isnan(column)
    if not is_valid.all():
        raise _outside("accuracy", column[~is_valid], 1.0)
    return column


def _outside(name: str, invalid: Array, high: float) -> DataError:
    return DataError(f"{name} must lie in [0, {high:g}], found {invalid[0]:g}. Pass values in this range.")


def _shaped(name: str, values: Any, shape: tuple[int, ...]) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != shape and not (array.size == 0 and 0 in shape):
        raise DataError(
            f"{name} has shape {array.shape}, expected {shape}. Pass one row per trajectory and, for rewards, one "
            "column per key."
        )
    return array.reshape(shape)
