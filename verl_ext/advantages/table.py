"""The rewards of a batch, however a trainer stores them, and the core's `Batch` of them."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from verl_ext.core.batch import LARGEST_REWARD, SCORE, Batch, unit_accuracy
from verl_ext.core.groups import Array, Bools, Groups, Index, label_text
from verl_ext.core.per_turn_rewards import pad_entries
from verl_ext.core.row_index import RowIndex, row_sums, write_over_mask
from verl_ext.core.rubrics import Criteria, to_columns
from verl_ext.core.turn_spans import TurnSpans
from verl_ext.core.turns import Turns
from verl_ext.errors import ConfigurationError, DataError, listed, unknown
from verl_ext.run import Run
from verl_ext.settings import ACCURACY, RewardsSettings

TOKEN_FIELD = "token_level_scores_"  # noqa: S105 - a field's name
ALL = slice(None)
"""Selects all rows."""
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
    results: bool = False
    """Whether to read everything that the reward function returned, for metrics or to find the accuracy."""

    @classmethod
    def of(cls, run: Run) -> Request:
        """Return what a run needs of each of its batches."""
        rewards, chain = run.settings.rewards, run.chain
        names = rewards.keys or ()
        results = run.logged_rewards == "all"
        if chain is None:
            # verl computes the advantages. Only metrics need the score: its curve, and the contributions in grpo.
            logs_contributions = run.name == "grpo" and bool(names)
            score = SCORE in names or results or logs_contributions
        else:
            # Without a KL term, the estimator gets the score from verl.
            writes_score = rewards.token_scores and SCORE in names
            score = run.settings.kl_in_reward or writes_score
            if chain.needs_accuracy and rewards.accuracy_key is not None:
                names = (*names, rewards.accuracy_key)
            elif chain.needs_accuracy:
                results = True
            names = (*names, *chain.needs_fields)
        has_turns = bool(rewards.per_turn)
        max_response_length = 0
        if has_turns and run.trainer is not None:
            max_response_length = run.trainer.config.data.max_response_length
        return cls(rewards, names, score, has_turns, max_response_length, results)


@dataclass(kw_only=True)
class Table:
    """The rewards of a batch, one value per trajectory, however a trainer stores them.

    In the shapes below, `T` is the number of trajectories, and `N` the number of rows of the core's `Batch`. Such a row
    is a whole response or, with rewards per turn, one turn of a response.

    A reward that the configuration names comes from the first of these that has its name:

    1. `token_scores`, the sums of the batch fields `token_level_scores_<key>`, which a process reward model writes;
    2. `results`, what the reward function returned;
    3. `fields`, other fields of the batch, which the agent loop or a colocated reward model writes.

    The trainer's score is the sum of verl's token-level scores: the reward function's `score` and whatever the reward
    manager adds to it. It is the reward of a run without `rewards.keys`. The reward `score` is what the reward function
    returned, else the trainer's score, but never one of `fields`. Only a field `token_level_scores_score` comes first.
    """

    settings: RewardsSettings
    rows: RowIndex
    """The rows of the batch by trajectory."""
    labels: Sequence[Hashable]
    """`T` uids."""
    groups: Groups | None = None
    """The trajectories by uid, if they are known."""
    token_scores: Mapping[str, Array] = field(default_factory=dict)
    """`[T]` by reward."""
    results: Mapping[str, Sequence[Any]] | None = field(default_factory=dict)
    """`T` values by name. None if the trainer does not say which of its fields the reward function returned."""
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """`T` values by name. They include the results if `results` is None."""
    score: Array | None = None
    """`[T]` the trainer's score before any KL term. None if it was not read and the estimator has not been called."""
    spans: TurnSpans | None = None
    """The turns of the trajectories, or None without rewards per turn."""
    truncated: Bools | None = None
    """`[T]` whether the response was truncated, so that it may have entries without a turn. None: no response was."""
    entries: dict[str, Index] = field(default_factory=dict)
    """`[T]` the number of entries of each reward per turn that was read."""

    @property
    def trajectory_of_batch_row(self) -> Index:
        """`[N]` the trajectory of each row of `Batch`."""
        if self.spans is None:
            return np.arange(len(self.labels))
        return self.spans.trajectory_of_turn

    def tokens(self, mask: torch.Tensor) -> Array:
        """Return `[N]` the number of tokens in the loss of each row of `Batch`, from the float mask."""
        if self.spans is None:
            return self.rows.total(row_sums(mask))
        return self.spans.tokens(mask)

    def scatter(self, values: Array, mask: torch.Tensor) -> torch.Tensor:
        """Write the values `[N]` over the float mask, in place: each on the tokens of its row of `Batch`."""
        if self.spans is None:
            return write_over_mask(self.rows.scatter(values), mask)
        value_of_run, run_lengths = self.spans.span_values(values, mask.numel())
        return write_over_mask(value_of_run, mask, run_lengths)

    def per_response(self) -> Table:
        """Return the same table with one row of `Batch` per response."""
        return replace(self, spans=None)

    def batch(
        self,
        keys: Sequence[str] | None,
        included_rows: Index | slice = ALL,
        *,
        for_estimator: bool = True,
        tokens: Array | None = None,
        accuracy: Array | None = None,
        kl_reward: Array | None = None,
        fields: Sequence[str] = (),
    ) -> Batch:
        """Return the core's `Batch` of some rewards. None as `keys` stands for the trainer's score.

        `included_rows` selects `N'` of the `N` rows. `tokens` is `[N]`, `accuracy` and `kl_reward` are `[T]`. For an
        estimator, conditions are applied, and a missing reward is an error. Otherwise the batch is for metrics, and a
        missing reward is NaN.
        """
        trajectories = self.trajectory_of_batch_row[included_rows]  # [N']
        arguments: dict[str, Any] = {}
        if keys is None:
            score = self.trainer_score(strict=for_estimator)
            arguments["rewards"] = score[trajectories][:, None]
            arguments["keys"] = [SCORE]
        else:
            arguments |= self._columns(keys, included_rows, trajectories, for_estimator=for_estimator)
            if for_estimator and self.settings.conditions:
                conditions = self.settings.conditions
                arguments["conditions"] = {key: conditions[key] for key in keys if key in conditions}
        if self.spans is None:
            outputs = self.rows.outputs
        else:
            outputs = self.spans.outputs
            arguments["turns"] = self._turns(keys or (), trajectories)
        if tokens is not None:
            arguments["lengths"] = tokens[included_rows]
        if accuracy is not None:
            arguments["accuracy"] = accuracy[trajectories]
        if kl_reward is not None:
            arguments["kl_reward"] = kl_reward[trajectories]
        rubrics = [key for key in keys or () if key in (self.settings.rubrics or ())]
        values_of_field = {name: self._values(name) for name in (*fields, *rubrics)}
        is_whole_table = self.spans is None and isinstance(included_rows, slice)
        if is_whole_table:  # a row for each trajectory, so nothing is copied
            arguments |= {"labels": self.labels, "prompts": self.groups, "fields": values_of_field}
        else:
            arguments["labels"] = _take(self.labels, trajectories)
            arguments["fields"] = {name: _take(values, trajectories) for name, values in values_of_field.items()}
        return Batch.of(outputs=outputs[included_rows], **arguments)

    def _columns(
        self, keys: Sequence[str], included_rows: Index | slice, trajectories: Index, *, for_estimator: bool
    ) -> dict[str, Any]:
        """Return the rewards as arguments of `Batch.of`, with a column for each reward or criterion."""
        rewards: list[Array | Criteria] = []
        rubrics = self.settings.rubrics or ()
        for key in keys:
            if key in rubrics:
                rewards.append(self._criteria(key)[trajectories])
            elif key in (self.settings.per_turn or ()):
                rewards.append(self.rewards_per_turn(key)[included_rows])
            else:
                rewards.append(self.column(key, strict=for_estimator)[trajectories])
        if rubrics:
            return to_columns(keys, rewards)
        columns: list[Any] = rewards
        return {"rewards": np.column_stack(columns), "keys": list(keys)}

    def _turns(self, keys: Sequence[str], trajectories: Index) -> Turns:
        """Return the turns of the rows of `Batch`, and which of the rewards are per turn."""
        turns_of_trajectory = np.unique(trajectories, return_counts=True)[1]
        per_turn = self.settings.per_turn or ()
        columns_per_turn = [column for column, key in enumerate(keys) if key in per_turn]
        return Turns.of_counts(turns_of_trajectory, tuple(columns_per_turn), self.settings.turn_discount)

    # Rewards: `[T]` values, or `[N]` for a reward per turn.

    def column(self, key: str, setting: str = "keys", *, strict: bool = True) -> Array:
        """Return `[T]` values of a reward that the configuration names. NaN means "not scored".

        `setting`, of `algorithm.rewards`, names the key. If not `strict`, the values are for metrics alone, so a
        missing or infinite value is NaN instead of an error.
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
        turns = np.bincount(self.trajectory_of_batch_row)
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

        Each reward is on the last token of its response. `lengths` `[B]` are the tokens of each row of the batch. A
        field that exists already, a process reward model's, is kept.
        """
        ends = lengths.cumsum(0)
        offsets = torch.nn.functional.pad(ends, (1, 0))
        has_tokens = lengths > 0
        for key in keys:
            if key not in self.token_scores:
                reward_of_trajectory = np.nan_to_num(self.column(key), nan=0.0)
                reward_of_row = torch.from_numpy(self.rows.scatter(reward_of_trajectory)).float()
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


def _take(values: Sequence[Any], places: Index) -> list[Any]:
    """Return the entries of a sequence at these places."""
    return [values[place] for place in places.tolist()]


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
