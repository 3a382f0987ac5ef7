"""The table of a batch's rewards, however a trainer stores them; read from the batch of a `RayPPOTrainer`."""

import math
import sys
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl_ext.core.batch import LARGEST_REWARD, SCORE, Batch, unit_accuracy
from verl_ext.core.groups import Array, Bools, Groups, Index, label_text
from verl_ext.core.per_turn_rewards import pad_entries
from verl_ext.core.row_index import RowIndex, row_sums, scores, write_over_mask
from verl_ext.core.rubrics import Criteria, to_columns
from verl_ext.core.turn_spans import TurnSpans
from verl_ext.core.turns import Turns
from verl_ext.errors import ConfigurationError, DataError, listed, unknown
from verl_ext.settings import ACCURACY, RewardsSettings

TOKEN_FIELD = "token_level_scores_"  # noqa: S105 - a field's name
_NUMBER = (float, np.bool_, np.integer, np.floating)


@dataclass(frozen=True)
class Needs:
    """What a run reads of each batch, beside what verl passes to an estimator."""

    settings: RewardsSettings
    names: tuple[str, ...] = ()
    """Rewards and fields that the configuration names."""
    score: bool = False
    """The trainer's score, before any KL term."""
    turns: bool = False
    """The turns of each response, and whether it was cut."""
    longest: int = 0
    """Tokens at which a response is cut; 0 if that is not known."""
    returned: bool = False
    """Everything that the reward function returned, for metrics or for an accuracy that is not named."""


@dataclass(kw_only=True)
class Table:
    """The rewards of a batch, one value per trajectory, however a trainer stores them.

    The trainer's score is the sum of verl's token-level scores: the reward function's `score` and whatever the reward
    manager adds to it. It is the reward of a run without `rewards.keys`.

    A reward that the configuration names comes from the first of these that exists: the sum over the response of the
    batch field `token_level_scores_<key>` (of a process reward model), the reward function's result, a field of that
    name (of the agent loop, or of a colocated reward model). `score` is never such a field: without a result of the
    reward function it is the trainer's score.
    """

    settings: RewardsSettings
    rows: RowIndex
    """The rows of the batch by trajectory."""
    labels: Sequence[Hashable]
    """`N` uids."""
    groups: Groups | None = None
    """The trajectories by uid, if that is known."""
    token_scores: Mapping[str, Array] = field(default_factory=dict)
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """One entry per trajectory."""
    returned: Collection[str] | None = ()
    """Those of the fields that the reward function returned; None if the trainer does not say which ones these are."""
    score: Array | None = None
    """`[N]` the trainer's score before any KL term; None until it is read, or the estimator is given it."""
    spans: TurnSpans | None = None
    """Where their turns are; None without rewards by turn."""
    cut: Bools | None = None
    """`[N]` whether the response was cut at its longest, so that entries by turn may be left over; None: none was."""
    entries: dict[str, Index] = field(default_factory=dict)
    """`[N]` the entries given for each reward by turn that was read."""

    @property
    def owner(self) -> Index:
        """`[M]` the trajectory of each row of `Batch`; by turn, that of each turn."""
        return np.arange(len(self.labels)) if self.spans is None else self.spans.trajectory_of_turn

    def batch(
        self,
        keys: Sequence[str] | None,
        part: Index | slice = slice(None),
        *,
        counts: bool = True,
        tokens: Array | None = None,
        accuracy: Array | None = None,
        kl_reward: Array | None = None,
        fields: Sequence[str] = (),
    ) -> Batch:
        """Return the core's `Batch` of some rewards, of all rows or a part: trajectories, or by turn their turns.

        `keys` are rewards that the configuration names; None stands for the trainer's score. `counts`: as an estimator
        gets them, with their conditions. `tokens` `[M]` is one number per row, `accuracy` and `kl_reward` `[N]` one per
        trajectory.
        """
        every, turns, per_turn = self.owner, None, self.settings.per_turn or ()
        named = keys or ()
        texts = [key for key in self.settings.rubrics or () if key in named]
        conditions = {
            key: needed for key, needed in (self.settings.conditions or {}).items() if key in named and counts
        }
        owner, whole = every[part], self.spans is None and isinstance(part, slice)
        columns: list[Array | Criteria] = []
        if keys is None:
            columns.append(self.trainer_score(counts=counts)[every][part])
        for key in named:
            if key in texts:
                columns.append(Criteria.of(key, self.labels, self._field(key, "algorithm.rewards.rubrics names"))[part])
            else:
                column = self.turns_of(key) if key in per_turn else self.column(key, counts=counts)[every]
                columns.append(column[part])
        outputs = self.rows.outputs
        if self.spans is not None:
            outputs, places = self.spans.outputs, tuple(place for place, key in enumerate(named) if key in per_turn)
            turns = Turns.of_counts(np.unique(owner, return_counts=True)[1], places, self.settings.turn_discount)

        def selected(values: Any) -> Any:
            return values if whole else [values[trajectory] for trajectory in owner.tolist()]

        return Batch.of(
            labels=selected(self.labels),
            prompts=self.groups if whole else None,
            turns=turns,
            **to_columns((SCORE,) if keys is None else keys, columns),
            conditions=conditions,
            lengths=None if tokens is None else tokens[part],
            accuracy=None if accuracy is None else accuracy[owner],
            kl_reward=None if kl_reward is None else kl_reward[owner],
            outputs=outputs[part],
            fields={name: selected(self._field(name)) for name in (*fields, *texts)},
        )

    def trainer_score(self, *, counts: bool = True) -> Array:
        """Return `[N]` the trainer's score before any KL term; `counts` as for `column`."""
        if self.score is None:
            raise DataError(
                "The trainer's scores without the KL term are missing in this batch. Pass them in the trainer as "
                "batch['token_level_scores']."
            )
        return self.score if counts else _finite(self.score)

    def column(self, key: str, setting: str = "keys", *, counts: bool = True) -> Array:
        """Return `[N]` values of a reward that the configuration names; NaN means "not scored".

        `setting`, of `algorithm.rewards`, names the key. `counts`: the values enter advantages, so a missing or
        infinite one is an error; for metrics alone it is NaN.
        """
        if key in self.token_scores:
            return self.token_scores[key]
        if key == SCORE:
            return self._returned_score(counts=counts)
        if key in self.fields:
            return self._numbers(key, self.fields[key], counts=counts)
        numeric = [name for name, values in self.fields.items() if any(map(is_number, values))]
        valid = {SCORE, *self.token_scores, *map(str, numeric)}
        raise ConfigurationError(f"algorithm.rewards.{setting}: {unknown('reward component', key, valid)}.")

    def accuracy_key(self) -> str:
        """Return the reward that is the accuracy: the named one, else by what the reward function returned."""
        without_acc = self.settings.accuracy_in(())  # the named one, a single key, or the score
        if self.settings.accuracy_key is not None:
            return without_acc
        if without_acc == ACCURACY:  # a single key, which may be a field that the function did not return
            return ACCURACY
        return ACCURACY if self.is_returned(ACCURACY) else without_acc

    def accuracy(self) -> Array:
        """Return `[N]` the accuracy in [0, 1], NaN where it is not scored."""
        key = self.accuracy_key()
        is_named = self.settings.accuracy_key is not None
        if not is_named and key == ACCURACY and ACCURACY in (self.returned or ()):
            # The function's result, even if a process reward model wrote a field of this name.
            values = self._numbers(key, self.fields[key], counts=True)
        else:
            values = self.column(key, "accuracy_key")
        return unit_accuracy(values, self.labels, key=key, threshold=self.settings.accuracy_threshold)

    def is_returned(self, name: str) -> bool:
        """Return whether the reward function returned a value of this name.

        Raise if a field has this name and the trainer does not say who wrote it.
        """
        if self.returned is None and name in self.fields:
            raise ConfigurationError(
                f"The batch has a column {name!r}, but the trainer does not say whether the reward function returned "
                "it, because data.meta_info['reward_extra_keys'] is missing. Set algorithm.rewards.accuracy_key and "
                "algorithm.rewards.keys to rewards with other names, or add these keys in the trainer."
            )
        return name in (self.returned or ())

    def _returned_score(self, *, counts: bool) -> Array:
        """Return `[N]` the `score` that the reward function returned, and the trainer's score where it returned none.

        verl's manager `rate_limited` itself scores a response whose scoring timed out, with 0 and without a `score`.
        """
        if not self.is_returned(SCORE):
            return self.trainer_score(counts=counts)
        values = self.fields[SCORE]
        missing = [row for row, value in enumerate(values) if value is None]
        if missing:
            values = list(values)
            for row in missing:
                values[row] = float(self.trainer_score()[row])
        return self._numbers(SCORE, values, counts=counts)

    def turns_of(self, key: str) -> Array:
        """Return `[M]` what a reward gives for each turn, 0 where that is missing; keep the number of entries given."""
        lists = self._field(key, "algorithm.rewards.per_turn names")
        cut = np.zeros(len(self.labels), dtype=bool) if self.cut is None else self.cut
        turns, text = np.bincount(self.owner), key in (self.returned or ())
        column, self.entries[key] = pad_entries(key, self.labels, lists, turns, cut, text=text)
        return column

    def tokens(self, mask: torch.Tensor) -> Array:
        """Return `[M]` the tokens of each row of `Batch` in the loss, from the mask of floats."""
        return self.rows.total(row_sums(mask)) if self.spans is None else self.spans.tokens(mask)

    def scatter(self, values: Array, mask: torch.Tensor) -> torch.Tensor:
        """Write the values `[M]` over the mask of floats, in place: each on the tokens of its row of `Batch`."""
        if self.spans is None:
            return write_over_mask(self.rows.scatter(values), mask)
        per_span, counts = self.spans.span_values(values, mask.numel())
        return write_over_mask(per_span, mask, counts)

    def token_fields(self, keys: Sequence[str], lengths: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the fields `token_level_scores_<key>` to write, as nested tensors: 0 where not scored.

        Each reward is on the last token of its response; `lengths` has the tokens of each row. A field that exists
        already, a process reward model's, is kept.
        """
        ends = lengths.cumsum(0)
        offsets = torch.nn.functional.pad(ends, (1, 0))
        for key in keys:
            if key not in self.token_scores:
                column = np.nan_to_num(self.column(key), nan=0.0)
                values = torch.from_numpy(self.rows.scatter(column)).float()
                flat = torch.zeros(int(lengths.sum()))
                flat[ends[lengths > 0] - 1] = values[lengths > 0]
                yield TOKEN_FIELD + key, torch.nested.nested_tensor_from_jagged(flat, offsets)

    def _field(self, name: str, who: str = "A step of the estimator reads") -> Sequence[Any]:
        """Return the `N` entries of a field, which a step or a setting names."""
        if name not in self.fields:
            raise ConfigurationError(
                f"{who} the field {name!r}, but the batch has only {listed(self.fields)}. Return it from the reward "
                "function, or correct the name."
            )
        return self.fields[name]

    def _numbers(self, key: str, values: Any, *, counts: bool) -> Array:
        """Return the values as floats, one per trajectory; NaN for what is no finite number if none `counts`."""
        if len(values) != len(self.labels):
            raise DataError(
                f"The reward {key!r} has {len(values)} entries for {len(self.labels)} responses. Return one value per "
                "response."
            )
        flat = math.prod(getattr(values, "shape", ())) == len(self.labels)
        if flat and isinstance(values, torch.Tensor):
            values = values.double().cpu().numpy()
        elif not (flat and isinstance(values, np.ndarray) and values.dtype.kind in "biuf"):
            for label, value in zip(self.labels, values, strict=True):
                if counts and not is_number(value):
                    raise _not_a_number(key, label, value)
            values = np.array([float(value) if counts or is_number(value) else np.nan for value in values])
        column: Array = values.astype(np.float64).reshape(len(self.labels))
        return column if counts else _finite(column)


def _not_a_number(key: str, label: Hashable, value: Any) -> DataError:
    """Return the error for a reward that is not one number."""
    found = "missing or None" if value is None else f"{value!r:.80} ({type(value).__name__})"
    fix = f"Return a number as {key!r} for every response, NaN if the response is not scored."
    if isinstance(value, list | tuple | np.ndarray) or (isinstance(value, str) and value.startswith("[")):
        fix += (
            f" For a list with one number per turn, set algorithm.rewards.per_turn=[{key}]. For a list of criteria, "
            f"set algorithm.rewards.rubrics=[{key}]."
        )
    return DataError(f"The reward {key!r} of {label_text(label)} is {found}. {fix}", label=label)


def of_batch(
    fields: Mapping[str, Any],
    tensors: Any,
    uids: Sequence[Hashable],
    mask: torch.Tensor,
    needs: Needs,
    *,
    returned: Collection[str] | None,
) -> Table:
    """Read from verl's `non_tensor_batch` (`fields`) and `batch` (`tensors`), which have one entry per row.

    `tensors` may read each field from another process, so only those that the run needs are read. `returned` are the
    fields that the reward function returned; None if the trainer does not say it.
    """
    groups = Groups.of(uids)
    rows = RowIndex.of_groups(groups, mask)
    present = set(tensors.keys())
    cut = None
    if needs.turns and "attention_mask" in present:
        width = mask.shape[1]
        cut = rows.gather(row_sums(tensors["attention_mask"][:, -width:].float())) >= (needs.longest or width)

    def total(name: str) -> Array:
        return rows.gather(scores(tensors[name], mask))

    return Table(
        settings=needs.settings,
        rows=rows,
        spans=TurnSpans.of(mask, rows) if needs.turns else None,
        labels=uids if rows.one_to_one else rows.labels(uids),
        groups=groups if rows.one_to_one else None,
        token_scores={name: total(TOKEN_FIELD + name) for name in needs.names if TOKEN_FIELD + name in present},
        fields=fields if rows.one_to_one else {name: rows.labels(values) for name, values in fields.items()},
        returned=None if returned is None else [name for name in returned if name in fields],
        score=total("token_level_scores") if needs.score and "token_level_scores" in present else None,
        cut=cut,
    )


def _finite(column: Array) -> Array:
    """Return `[N]` values, NaN for those that are not finite or too large for a reward."""
    return np.where(np.abs(column) <= LARGEST_REWARD, column, np.nan)


def is_number(value: object) -> bool:
    """Return whether a value is one number, as a component must be."""
    if isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 0:
        value = value.item()
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, _NUMBER)
