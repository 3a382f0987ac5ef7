"""Read the named rewards of a batch: from TransferQueue for verl's default trainer, from a batch for `RayPPOTrainer`.

Only this module calls TransferQueue, and only this module takes the names of its rows apart.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl_ext.core.batch import LARGEST_REWARD
from verl_ext.core.groups import Array, Groups, Index
from verl_ext.core.rows import Rows, row_sums, scores
from verl_ext.core.turns import Runs, per_turn
from verl_ext.errors import ConfigurationError, DataError, listed, unknown

SCORE = "score"
SOURCE = "data_source"
TOKEN_FIELD = "token_level_scores_"  # noqa: S105 - a field's name
_NUMBER = (float, np.bool_, np.integer, np.floating)


@dataclass(frozen=True)
class Needs:
    """What a run reads of each batch, beside what verl passes to an estimator."""

    names: tuple[str, ...] = ()
    """Rewards and fields."""
    score: bool = False
    """The score before any KL term."""
    by_turn: bool = False
    """The turns of each response, and its length."""
    longest: int = 0
    """Tokens at which a response is cut; 0 if that is not known."""
    everything: bool = False
    """All that the reward function returned, and the data source."""


@dataclass(frozen=True, kw_only=True)
class Components:
    """The named rewards of a batch, one value per trajectory.

    A component comes from the first of these that exists: the sum over the response of the batch field
    `token_level_scores_<key>` (of a process reward model), the reward function's result, a field of that name (of
    the agent loop, or of a colocated reward model).
    """

    rows: Rows
    """The rows of the batch by trajectory."""
    labels: Sequence[Hashable]
    """`N` uids."""
    groups: Groups | None = None
    """The trajectories by uid, if that is known."""
    token_scores: Mapping[str, Array] = field(default_factory=dict)
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """One entry per trajectory."""
    returned: Collection[str] = ()
    """Those of the fields that the reward function returned."""
    score: Array | None = None
    """`[N]` the score before any KL term; None if it was not read."""
    response_lengths: Array | None = None
    """`[N]` tokens of the scored responses, whether the loss counts them or not; None if they were not read."""
    runs: Runs | None = None
    """Their turns; None without rewards by turn."""
    longest: int = 0
    """Tokens at which a response is cut."""

    @property
    def owner(self) -> Index:
        """`[M]` the trajectory of each row of the core: of each turn, with rewards by turn."""
        return np.arange(len(self.labels)) if self.runs is None else self.runs.owner

    @property
    def outputs(self) -> Array:
        """`[M]` rows of the batch that begin with each of them."""
        return self.rows.outputs if self.runs is None else self.runs.outputs

    def __contains__(self, key: object) -> bool:
        return key in self.token_scores or key in self.fields

    def names(self) -> list[str]:
        """Return the valid names: all numeric components, and the score, which every batch has."""
        numeric = (str(key) for key, values in self.fields.items() if any(map(is_number, values)))
        return sorted({SCORE, *self.token_scores, *numeric})

    def column(self, key: str, setting: str, *, counts: bool = True) -> Array:
        """Return `[N]` values; NaN means "not scored". `setting` is the setting that names the key.

        `counts`: the values enter advantages, so a missing or infinite one is an error; for metrics alone it is NaN.
        """
        if key in self.token_scores:
            return self.token_scores[key]
        if key in self.fields:
            return self._numbers(key, self.fields[key]) if counts else self._logged(key)
        if key == SCORE and self.score is not None:
            return self.score
        raise ConfigurationError(f"{setting}: {unknown('reward component', key, self.names())}")

    def numbers(self) -> Iterator[tuple[str, Array]]:
        """Yield each component that the reward function returned as numbers; NaN where it is missing or not finite."""
        for name in self.returned:
            if isinstance(name, str) and all(value is None or is_number(value) for value in self.fields[name]):
                yield name, self._logged(name)

    def entries(self, name: str) -> Sequence[Any]:
        """Return the `N` entries of a field."""
        if name not in self.fields:
            raise ConfigurationError(f"a step needs the field {name!r}, but the batch has {listed(self.fields)}")
        return self.fields[name]

    def matrix(self, keys: Sequence[str], *, counts: bool = True) -> Array:
        """Return `[N, K]` values of the rewards in `algorithm.rewards.keys`."""
        return np.stack([self.column(key, "algorithm.rewards.keys", counts=counts) for key in keys], axis=1)

    def by_turn(self, key: str) -> tuple[Array, int]:
        """Return `[M]` what a reward gives for each turn, and how many entries are left over of responses cut short."""
        if key not in self.fields:
            raise ConfigurationError(f"algorithm.rewards.by_turn: {unknown('reward component', key, self.fields)}")
        lengths = np.zeros(len(self.labels)) if self.response_lengths is None else self.response_lengths
        cut = lengths >= self.longest
        return per_turn(key, self.labels, self.fields[key], np.bincount(self.owner), cut, text=key in self.returned)

    def token_fields(self, keys: Sequence[str], lengths: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the fields `token_level_scores_<key>` to write, as nested tensors: 0 where not scored.

        Each reward is on the last token of its response; `lengths` has the tokens of each row. A field that exists
        already, a process reward model's, is kept.
        """
        ends = lengths.cumsum(0)
        offsets = torch.nn.functional.pad(ends, (1, 0))
        for key in keys:
            if key not in self.token_scores:
                column = np.nan_to_num(self.column(key, "algorithm.rewards.keys"), nan=0.0)
                values = torch.from_numpy(self.rows.give(column)).float()
                flat = torch.zeros(int(lengths.sum()))
                flat[ends[lengths > 0] - 1] = values[lengths > 0]
                yield TOKEN_FIELD + key, torch.nested.nested_tensor_from_jagged(flat, offsets)

    def _logged(self, key: str) -> Array:
        """Return the values; NaN where one is missing, no number or not finite."""
        column = self._numbers(key, [value if is_number(value) else np.nan for value in self.fields[key]])
        return np.where(np.abs(column) <= LARGEST_REWARD, column, np.nan)

    def _numbers(self, key: str, values: Any) -> Array:
        """Return the values as floats, one per trajectory."""
        if len(values) != len(self.labels):
            raise DataError(f"reward {key!r} has {len(values)} entries, expected {len(self.labels)}: one per response")
        flat = math.prod(getattr(values, "shape", ())) == len(self.labels)
        if flat and isinstance(values, torch.Tensor):
            values = values.double().cpu().numpy()
        elif not (flat and isinstance(values, np.ndarray) and values.dtype.kind in "biuf"):
            for label, value in zip(self.labels, values, strict=True):
                if not is_number(value):
                    raise DataError(_no_number(key, label, value))
            values = np.array(list(map(float, values)))
        column: Array = values.astype(np.float64).reshape(len(self.labels))
        return column


def of_batch(
    fields: Mapping[str, Any] | None,
    tensors: Any,
    uids: Sequence[Hashable],
    mask: torch.Tensor,
    needs: Needs,
    *,
    returned: Collection[str] = (),
) -> Components:
    """Read from verl's `non_tensor_batch` (`fields`) and `batch` (`tensors`), which have one entry per row.

    `tensors` may read each field from another process, so only those that the run needs are read. `returned` are the
    fields that the reward function returned.
    """
    groups = Groups.of(uids)
    rows = Rows.of_groups(groups, mask)
    columns = {
        name: values if rows.plain else [values[row] for row in rows.scored] for name, values in (fields or {}).items()
    }
    present = set() if tensors is None else set(tensors.keys())
    lengths = None
    if needs.by_turn and "attention_mask" in present:
        lengths = rows.take(row_sums(tensors["attention_mask"][:, -mask.shape[1] :].float()))

    def total(name: str) -> Array:
        return rows.take(scores(tensors[name], mask))

    return Components(
        rows=rows,
        runs=Runs.of(mask, rows) if needs.by_turn else None,
        longest=needs.longest or mask.shape[-1],
        labels=uids if rows.plain else rows.labels(uids),
        groups=groups if rows.plain else None,
        token_scores={name: total(TOKEN_FIELD + name) for name in needs.names if TOKEN_FIELD + name in present},
        fields=columns,
        returned=[name for name in returned if name in columns],
        score=total("token_level_scores") if needs.score and "token_level_scores" in present else None,
        response_lengths=lengths,
    )


def of_queue(
    keys: Sequence[str], partition_id: str, needs: Needs, *, tags: Sequence[Mapping[str, Any]] | None = None
) -> Components:
    """Read what a run needs from TransferQueue; `keys` name the rows: `{uid}_{session}_{part}`.

    A reward function's result is in `extra_fields["reward_extra_info"]`, what the agent loop wrote
    (`tool_rewards`) beside it; a colocated reward model's entries are fields. TransferQueue leaves out fields that no
    row has.
    """
    padding = [bool(tag.get("is_padding", False)) for tag in tags or ()] or [False] * len(keys)
    rows = Rows.of_sessions(keys, np.array(padding, dtype=bool))
    scored = [keys[row] for row in rows.scored.tolist()]
    labels = uids_of(scored)
    if not scored:
        return Components(rows=rows, labels=labels)
    names = dict.fromkeys(needs.names)
    per_token = [TOKEN_FIELD + name for name in names] + ["rm_scores"] * needs.score
    wanted = ["extra_fields", *names, *per_token] if names or needs.everything else per_token
    data = read_queue(scored, partition_id, wanted) if wanted else {}
    present = set(data.keys())
    totals, lengths = {}, None
    if needs.by_turn or not present.isdisjoint(per_token):
        mask = read_queue(scored, partition_id, ["response_mask"])["response_mask"]
        totals = {name: scores(dense(data[name]), dense(mask)) for name in per_token if name in present}
        lengths = mask.offsets().diff().double().cpu().numpy() if needs.by_turn else None
    columns = {name: data.pop(name) for name in names if name in present}
    fields = {name: column if isinstance(column, torch.Tensor) else column.tolist() for name, column in columns.items()}
    if needs.everything and SOURCE not in names:
        fields |= _sources(dict(zip(labels, scored, strict=True)), labels, partition_id)
    extra = data.pop("extra_fields").tolist() if "extra_fields" in present else []
    for name in names:
        if any(name in entry for entry in extra):
            fields[name] = [entry.get(name) for entry in extra]
    infos = [entry.get("reward_extra_info") or {} for entry in extra]
    returned = list(dict.fromkeys(name for info in infos for name in info))
    masks = read_queue(keys, partition_id, ["response_mask"])["response_mask"] if needs.by_turn else None
    return Components(
        rows=rows,
        runs=None if masks is None else Runs.of(dense(masks), rows),
        longest=needs.longest,
        labels=labels,
        token_scores={name: totals[TOKEN_FIELD + name] for name in names if TOKEN_FIELD + name in totals},
        fields=fields | {name: [info.get(name) for info in infos] for name in returned},
        returned=returned,
        score=totals.get("rm_scores"),
        response_lengths=lengths,
    )


def _sources(keys: Mapping[str, str], uids: Sequence[str], partition_id: str) -> dict[str, list[Any]]:
    """Read the data source of each trajectory from one row per uid, of `keys`: strings take long to read."""
    data = read_queue(list(keys.values()), partition_id, [SOURCE])
    if SOURCE not in data.keys():  # noqa: SIM118 - a TensorDict
        return {}
    sources = dict(zip(keys, data.pop(SOURCE).tolist(), strict=True))
    return {SOURCE: [sources[uid] for uid in uids]}


def uids_of(keys: Sequence[str]) -> list[str]:
    """Return the uid of each row, from its name in TransferQueue.

    >>> uids_of(["p_1_0_0"])
    ['p_1']
    """
    return [key.rsplit("_", 2)[0] for key in keys]


def read_queue(keys: Sequence[str], partition_id: str, fields: Sequence[str]) -> Any:
    """Read a TensorDict with one row per key."""
    import transfer_queue

    return transfer_queue.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=fields)


def write_queue(keys: Sequence[str], partition_id: str, fields: Mapping[str, Any]) -> None:
    """Add fields to the rows, or replace them."""
    import transfer_queue
    from tensordict import TensorDict

    transfer_queue.kv_batch_put(
        keys=keys, partition_id=partition_id, fields=TensorDict(dict(fields), batch_size=len(keys))
    )


def dense(values: torch.Tensor) -> torch.Tensor:
    """Return a field with one value per token, padded with 0."""
    return values.to_padded_tensor(0) if values.is_nested else values


def _no_number(key: str, label: Hashable, value: object) -> str:
    """Return the message for a value that is no number."""
    if value is None:
        return f"reward {key!r} is missing or None for uid {label!r}: return a number every time, NaN for 'not scored'"
    listed_turns = isinstance(value, list | np.ndarray) or str(value).startswith("[")
    remedy = f"; for a list by turn set algorithm.rewards.by_turn=[{key}]" if listed_turns else ""
    return (
        f"reward {key!r} of uid {label!r} is {value!r:.80} ({type(value).__name__}), expected one number per sample "
        f"(NaN for 'not scored'){remedy}"
    )


def is_number(value: object) -> bool:
    """Return whether a value is one number, as a component must be."""
    if isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 0:
        value = value.item()
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, _NUMBER)
