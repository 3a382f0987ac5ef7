"""The rewards of a batch, however a trainer stores them, and the core's `Batch` of them."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from verl_ext.core.batch import LARGEST_REWARD, SCORE, Batch, unit_accuracy
from verl_ext.core.chain import Chain
from verl_ext.core.groups import Array, Bools, Groups, Index, label_text
from verl_ext.core.row_index import RowIndex, TurnSpans, row_sums, write_over_mask
from verl_ext.core.rubrics import Criteria, to_columns
from verl_ext.core.turns import Turns, pad_entries
from verl_ext.errors import ConfigurationError, DataError, listed, unknown
from verl_ext.run import Run
from verl_ext.settings import ACCURACY, RewardsSettings

TOKEN_FIELD = "token_level_scores_"  # noqa: S105 - a field's name
ALL = slice(None)
"""Selects all segments, or all trajectories."""
_NUMBER = (float, np.bool_, np.integer, np.floating)


@dataclass(frozen=True)
class Request:
    """What to read of a batch, besides what verl passes to an estimator. Reading is slow, so nothing else is read."""

    settings: RewardsSettings
    names: tuple[str, ...] = ()
    """Rewards and fields that the configuration or a step names."""
    score: bool = False
    """Whether to read the trainer's score, before any KL term."""
    turns: bool = False
    """Whether to read the turns of each response, and whether the response was truncated."""
    max_response_length: int = 0
    """Number of tokens at which a response is truncated, or 0 if it is not known."""
    all_results: bool = False
    """Whether to read everything that the reward function returned, for metrics or to find the accuracy."""

    @classmethod
    def of(cls, run: Run) -> Request:
        """Return what a run needs of each of its batches."""
        request = _request_of_verl_estimator(run) if run.chain is None else _request_of_chain(run, run.chain)
        if run.settings.rewards.per_turn:
            # Without a trainer, as in `check`, the limit is not known.
            limit = run.trainer.config.data.max_response_length if run.trainer is not None else 0
            request = replace(request, turns=True, max_response_length=limit)
        return request


def _request_of_verl_estimator(run: Run) -> Request:
    """Return what the metrics of a run need whose advantages verl computes."""
    rewards = run.settings.rewards
    keys = rewards.keys or ()
    logs_everything = run.logged_rewards == "all"
    logs_contributions = run.name == "grpo" and bool(keys)  # of each reward to the score
    needs_score = SCORE in keys or logs_everything or logs_contributions
    return Request(rewards, keys, score=needs_score, all_results=logs_everything)


def _request_of_chain(run: Run, chain: Chain) -> Request:
    """Return what a run needs whose advantages verl_ext computes."""
    rewards = run.settings.rewards
    keys = rewards.keys or ()
    # Without a KL term, verl passes the trainer's score to the estimator. The score is written before that.
    needs_score = run.settings.kl_in_reward or (rewards.token_scores and SCORE in keys)
    names_of_accuracy: tuple[str, ...] = ()
    finds_accuracy = False
    if chain.needs_accuracy and rewards.accuracy_key is not None:
        names_of_accuracy = (rewards.accuracy_key,)
    elif chain.needs_accuracy:
        finds_accuracy = True  # it depends on what the reward function returned
    return Request(
        rewards,
        names=(*keys, *names_of_accuracy, *chain.needs_fields),
        score=needs_score,
        all_results=run.logged_rewards == "all" or finds_accuracy,
    )


@dataclass(kw_only=True)
class Table:
    """The rewards of a batch, one value per trajectory, however a trainer stores them.

    `T` is the number of trajectories, and `N` the number of segments: trajectories, or with per-turn rewards their
    turns. See `verl_ext.core` for the other letters.

    There are four sources of values:

    - `token_scores`, the sums of the batch fields `token_level_scores_<key>`, which a process reward model writes;
    - `results`, what the reward function returned;
    - `fields`, other fields of the batch, which the agent loop or a colocated reward model writes;
    - the trainer's score, the sum of verl's token-level scores: the reward function's `score`, and whatever the reward
      manager adds to it.

    Which of them has a value depends on what is read. The first source that has the name is used:

    | what is read                                  | first source       | second source | third source    |
    |-----------------------------------------------|--------------------|---------------|-----------------|
    | a reward                                      | `token_scores`     | `results`     | `fields`        |
    | the reward `score`                            | `token_scores`     | `results`     | trainer's score |
    | the reward of a run without `rewards.keys`    | trainer's score    |               |                 |
    | numbers per turn, a rubric, a field of a step | `results`          | `fields`      |                 |
    | the accuracy with `accuracy_key`              | the reward of this name, as above                    |
    | the accuracy without `accuracy_key`           | `acc` in `results` | the only reward, else `score`   |
    """

    settings: RewardsSettings
    row_index: RowIndex
    """The trajectory of each row of verl's batch."""
    labels: Sequence[Hashable]
    """`T` uids."""
    groups: Groups | None = None
    """The trajectories by uid, if they are known."""
    token_scores: Mapping[str, Array] = field(default_factory=dict)
    """`[T]` by reward."""
    results: Mapping[str, Sequence[Any]] | None = field(default_factory=dict)
    """`T` values by name. None if the trainer does not say which of its fields the reward function returned."""
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """`T` values by name: other fields of the trainer's batch. If `results` is None, they include the results."""
    score: Array | None = None
    """`[T]` the trainer's score before any KL term. None if it was not read."""
    spans: TurnSpans | None = None
    """The turns of the trajectories, or None without rewards per turn."""
    truncated: Bools | None = None
    """`[T]` whether the response was truncated, so that it may have entries without a turn. None: no response was."""
    entries: dict[str, Index] = field(default_factory=dict)
    """`[T]` the number of entries of each reward per turn that was read."""

    @property
    def trajectory_of_segment(self) -> Index:
        """`[N]` the trajectory of each segment."""
        if self.spans is None:
            return np.arange(len(self.labels))
        return self.spans.trajectory_of_turn

    def tokens(self, mask: torch.Tensor) -> Array:
        """Return `[N]` the number of tokens in the loss of each segment, from the float mask."""
        if self.spans is None:
            return self.row_index.total(row_sums(mask))
        return self.spans.tokens(mask)

    def scatter(self, values: Array, mask: torch.Tensor) -> torch.Tensor:
        """Write the values `[N]` over the float mask, in place: each on the tokens of its segment."""
        if self.spans is None:
            return write_over_mask(self.row_index.scatter(values), mask)
        value_of_run, run_lengths = self.spans.span_values(values, mask.numel())
        return write_over_mask(value_of_run, mask, run_lengths)

    def per_response(self) -> Table:
        """Return the same table with one segment per trajectory."""
        return replace(self, spans=None)

    def batch(
        self,
        keys: Sequence[str] | None,
        included_segments: Index | slice = ALL,
        *,
        for_estimator: bool = True,
        tokens: Array | None = None,
        accuracy: Array | None = None,
        kl_reward: Array | None = None,
        fields: Sequence[str] = (),
    ) -> Batch:
        """Return the core's `Batch` of some rewards. None as `keys` stands for the trainer's score.

        `included_segments` selects `N'` of the `N` segments. `tokens` is `[N]`, `accuracy` and `kl_reward` are `[T]`.
        For an estimator, conditions are applied, and a value that is missing for a response is an error. Otherwise the
        batch is for metrics, and such a value is NaN: see `column`. A list per turn or a rubric that is missing is an
        error in both cases.
        """
        trajectories = self.trajectory_of_segment[included_segments]  # [N']
        outputs = self.row_index.outputs if self.spans is None else self.spans.outputs
        arguments: dict[str, Any] = {"outputs": outputs[included_segments]}
        arguments |= self._columns(keys, included_segments, trajectories, for_estimator=for_estimator)
        arguments |= self._labels_and_fields(keys or (), included_segments, trajectories, fields)
        if for_estimator and keys is not None:
            conditions = self.settings.conditions or {}
            arguments["conditions"] = {key: conditions[key] for key in keys if key in conditions}
        if self.spans is not None:
            arguments["turns"] = self._turns(keys or (), trajectories)
        if tokens is not None:
            arguments["lengths"] = tokens[included_segments]
        if accuracy is not None:
            arguments["accuracy"] = accuracy[trajectories]
        if kl_reward is not None:
            arguments["kl_reward"] = kl_reward[trajectories]
        batch = Batch.of(**arguments)
        if self.settings.weights is not None and batch.reward_names == self.settings.keys:
            return batch.with_weights(self.settings.weights)
        return batch

    def _columns(
        self,
        keys: Sequence[str] | None,
        included_segments: Index | slice,
        trajectories: Index,
        *,
        for_estimator: bool,
    ) -> dict[str, Any]:
        """Return the rewards as arguments of `Batch.of`, with a column for each reward or criterion."""
        if keys is None:
            score = self.trainer_score(strict=for_estimator)
            return {"rewards": score[trajectories][:, None], "keys": [SCORE]}
        rewards: list[Array | Criteria] = []
        for key in keys:
            if key in (self.settings.rubrics or ()):
                rewards.append(self._criteria(key)[trajectories])
            elif key in (self.settings.per_turn or ()):
                rewards.append(self.rewards_per_turn(key)[included_segments])
            else:
                rewards.append(self.column(key, strict=for_estimator)[trajectories])
        return to_columns(keys, rewards)

    def _labels_and_fields(
        self, keys: Sequence[str], included_segments: Index | slice, trajectories: Index, fields: Sequence[str]
    ) -> dict[str, Any]:
        """Return the uids, and the values of fields and rubrics, as arguments of `Batch.of`."""
        rubrics = [key for key in keys if key in (self.settings.rubrics or ())]
        values_of_field = {name: self._values(name) for name in (*fields, *rubrics)}
        is_whole_table = self.spans is None and isinstance(included_segments, slice)
        if is_whole_table:  # each segment is a trajectory, so nothing is copied
            return {"labels": self.labels, "prompts": self.groups, "fields": values_of_field}
        return {
            "labels": _take(self.labels, trajectories),
            "fields": {name: _take(values, trajectories) for name, values in values_of_field.items()},
        }

    def _turns(self, keys: Sequence[str], trajectories: Index) -> Turns:
        """Return the turns of the segments, and which of the rewards are per turn."""
        turns_of_trajectory = np.unique(trajectories, return_counts=True)[1]
        per_turn = self.settings.per_turn or ()
        columns_per_turn = [column for column, key in enumerate(keys) if key in per_turn]
        return Turns.of_counts(turns_of_trajectory, tuple(columns_per_turn), self.settings.turn_discount)

    # Rewards: `[T]` values, or `[N]` for a reward per turn.

    def column(self, key: str, setting: str = "keys", *, strict: bool = True) -> Array:
        """Return `[T]` values of a reward that the configuration names. NaN means "not scored".

        `setting`, of `algorithm.rewards`, names the key. A name that no source has is an error. If not `strict`, the
        values are for metrics alone, so a value of `results` or `fields` that is missing for a response, or that is not
        a finite number, is NaN instead of an error.
        """
        if key in self.token_scores:
            return self.token_scores[key]
        if key == SCORE:
            return self._returned_score(strict=strict)
        values = self._find(key)
        if values is not None:
            return self._numbers(key, values, strict=strict)
        fields = {**self.fields, **(self.results or {})}
        names_of_numbers = [str(name) for name, values in fields.items() if any(map(is_number, values))]
        valid = {SCORE, *self.token_scores, *names_of_numbers}
        raise ConfigurationError(f"algorithm.rewards.{setting}: {unknown('reward component', key, valid)}.")

    def trainer_score(self, *, strict: bool = True) -> Array:
        """Return `[T]` the trainer's score before any KL term. If not `strict`, a value that is not finite is NaN."""
        if self.score is None:
            raise DataError(
                "The trainer's scores without the KL term are missing in this batch. Pass them in the trainer as "
                "batch['token_level_scores']."
            )
        return self.score if strict else _finite(self.score)

    def _returned_score(self, *, strict: bool) -> Array:
        """Return `[T]` the `score` that the reward function returned, and the trainer's score where it returned none.

        verl's manager `rate_limited` itself scores a response whose scoring timed out, with 0 and without a `score`.
        """
        values = self._find(SCORE) if self.is_returned(SCORE) else None
        if values is None:
            return self.trainer_score(strict=strict)
        missing = [trajectory for trajectory, value in enumerate(values) if value is None]
        if missing:  # otherwise the values stay an array, which may be `[T, 1]`
            values = list(values)
            for trajectory in missing:
                values[trajectory] = float(self.trainer_score()[trajectory])
        return self._numbers(SCORE, values, strict=strict)

    def rewards_per_turn(self, key: str) -> Array:
        """Return `[N]` the reward of each turn, 0 for a missing entry. Remember the number of entries."""
        lists = self._values(key, "algorithm.rewards.per_turn names")
        truncated = np.zeros(len(self.labels), dtype=bool) if self.truncated is None else self.truncated
        turns = np.bincount(self.trajectory_of_segment)
        is_text = key in (self.results or ())  # verl passes lists of the reward function as text
        rewards, self.entries[key] = pad_entries(key, self.labels, lists, turns, truncated, text=is_text)
        return rewards

    def _criteria(self, key: str) -> Criteria:
        return Criteria.of(key, self.labels, self._values(key, "algorithm.rewards.rubrics names"))

    def accuracy_key(self) -> str:
        """Return the reward that is the accuracy: the named reward, else what the reward function returned decides."""
        without_acc = self.settings.accuracy_in(())  # the named reward, a single key, or the score
        if self.settings.accuracy_key is not None:
            return without_acc
        if without_acc == ACCURACY:  # a single key, which may be a field that the reward function did not return
            return ACCURACY
        return ACCURACY if self.is_returned(ACCURACY) else without_acc

    def accuracy(self) -> Array:
        """Return `[T]` the accuracy in [0, 1], NaN where it is not scored."""
        key = self.accuracy_key()
        is_named = self.settings.accuracy_key is not None
        if not is_named and key == ACCURACY and self.results is not None and ACCURACY in self.results:
            # The result of the reward function, even if a process reward model wrote a field of this name.
            values = self._numbers(key, self.results[key], strict=True)
        else:
            values = self.column(key, "accuracy_key")
        return unit_accuracy(values, self.labels, key=key, threshold=self.settings.accuracy_threshold)

    def is_returned(self, name: str) -> bool:
        """Return whether the reward function returned a value of this name.

        Raise if the trainer does not say it and a field has this name.
        """
        if self.results is None and name in self.fields:
            raise ConfigurationError(
                f"The batch has a column {name!r}, but the trainer does not say whether the reward function returned "
                "it, because data.meta_info['reward_extra_keys'] is missing. Set algorithm.rewards.accuracy_key and "
                "algorithm.rewards.keys to rewards with other names, or add these keys in the trainer."
            )
        return name in (self.results or ())

    def token_fields(self, keys: Sequence[str], lengths: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the fields `token_level_scores_<key>` to write, as nested tensors: 0 where not scored.

        Each reward is on the last token of every row of its trajectory. `lengths` `[B]` are the tokens of each row. A
        field that exists already, a process reward model's, is kept.
        """
        ends = lengths.cumsum(0)
        offsets = torch.nn.functional.pad(ends, (1, 0))
        has_tokens = lengths > 0
        for key in keys:
            if key not in self.token_scores:
                reward_of_trajectory = np.nan_to_num(self.column(key), nan=0.0)
                reward_of_row = torch.from_numpy(self.row_index.scatter(reward_of_trajectory)).float()
                flat = torch.zeros(int(lengths.sum()))
                flat[ends[has_tokens] - 1] = reward_of_row[has_tokens]
                yield TOKEN_FIELD + key, torch.nested.nested_tensor_from_jagged(flat, offsets)

    def _find(self, name: str) -> Sequence[Any] | None:
        """Return the `T` values of a name: the results of the reward function, else a field. None if neither exists."""
        if self.results is not None and name in self.results:
            return self.results[name]
        return self.fields.get(name)

    def _values(self, name: str, who: str = "A step of the estimator reads") -> Sequence[Any]:
        """Return the `T` values of a field that a step or a setting names."""
        values = self._find(name)
        if values is None:
            names = {**self.fields, **(self.results or {})}
            raise ConfigurationError(
                f"{who} the field {name!r}, but the batch has only {listed(names)}. Return it from the reward "
                "function, or correct the name."
            )
        return values

    def _numbers(self, key: str, values: Any, *, strict: bool) -> Array:
        """Return the values as floats `[T]`. What is not a finite number is an error if `strict`, and NaN otherwise."""
        size = len(self.labels)
        if len(values) != size:
            raise DataError(
                f"The reward {key!r} has {len(values)} entries for {size} responses. Return one value per response."
            )
        if isinstance(values, torch.Tensor) and not values.is_nested:  # nested: a value per token, so not one number
            values = values.double().cpu().numpy()
        is_array_of_numbers = isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and values.size == size
        if is_array_of_numbers:
            column: Array = values.astype(np.float64).reshape(size)
        else:
            column = self._numbers_of_objects(key, values, strict=strict)
        return column if strict else _finite(column)

    def _numbers_of_objects(self, key: str, values: Sequence[Any], *, strict: bool) -> Array:
        numbers: list[float] = []
        for label, value in zip(self.labels, values, strict=True):
            if is_number(value):
                numbers.append(float(value))
            elif strict:
                raise _not_a_number(key, label, value)
            else:
                numbers.append(np.nan)
        return np.array(numbers, dtype=np.float64)


def _take(values: Sequence[Any], indices: Index) -> list[Any]:
    """Return the entries of a sequence at these indices."""
    return [values[index] for index in indices.tolist()]


def _not_a_number(key: str, label: Hashable, value: Any) -> DataError:
    """Return the error for a reward that is not one number."""
    description = "missing or None" if value is None else f"{value!r:.80} ({type(value).__name__})"
    fix = f"Return a number as {key!r} for every response, NaN if the response is not scored."
    is_list = isinstance(value, list | tuple | np.ndarray)
    is_text_of_list = isinstance(value, str) and value.startswith("[")
    if is_list or is_text_of_list:
        fix += (
            f" For a list with one number per turn, set algorithm.rewards.per_turn=[{key}]. For a list of criteria, "
            f"set algorithm.rewards.rubrics=[{key}]."
        )
    return DataError(f"The reward {key!r} of {label_text(label)} is {description}. {fix}", label=label)


def _finite(column: Array) -> Array:
    """Return `[T]` values, NaN for values that are not finite or too large for a reward."""
    is_valid = np.abs(column) <= LARGEST_REWARD
    return np.where(is_valid, column, np.nan)


def is_number(value: object) -> bool:
    """Return whether a value is one number, as a component must be."""
    if isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 0:
        value = value.item()
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, _NUMBER)
