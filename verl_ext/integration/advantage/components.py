"""Read the named rewards of a batch from all places where verl puts them, as columns of numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from verl_ext.core.groups import Array
from verl_ext.core.rows import Rows, scores
from verl_ext.errors import ConfigurationError, DataError, listed, unknown
from verl_ext.integration.compat.names import RESERVED, SCORE, TOKEN_FIELD

_NUMBER = (bool, int, float, np.bool_, np.integer, np.floating)


@dataclass(kw_only=True)
class Components:
    """Columns by name, with one value per trajectory.

    A component comes from the first of these that exists: the sum over the response of the batch field
    `token_level_scores_<key>` (of a process reward model), the reward function's result, a field of that name (of a
    colocated reward model).
    """

    labels: Sequence[Hashable]
    token_scores: Mapping[str, Callable[[], Array]] = field(default_factory=dict)
    """Computed on demand."""
    infos: Sequence[Mapping[str, Any]] = ()
    """What the reward function returned."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """One entry per trajectory, or per row with `rows`."""
    rows: Rows | None = None

    @classmethod
    def of_batch(
        cls,
        rows: Rows,
        labels: Sequence[Hashable],
        mask: torch.Tensor,
        fields: Mapping[str, Any] | None,
        tensors: Mapping[str, Any] | None,
    ) -> Components:
        """From verl's `non_tensor_batch` and `batch`, which have one entry per row."""
        present = {} if tensors is None else tensors
        token_scores = {
            name.removeprefix(TOKEN_FIELD): lambda name=name: rows.take(token_totals(name, present[name], mask))
            for name in map(str, present.keys())
            if name.startswith(TOKEN_FIELD)
        }
        return cls(labels=labels, token_scores=token_scores, fields=fields or {}, rows=rows)

    def __contains__(self, key: str) -> bool:
        return key in self.token_scores or key in self.fields or key in self._seen_in_infos

    def token_fields(self, keys: Sequence[str], rows: Rows) -> Iterator[tuple[str, torch.Tensor]]:
        """Names `token_level_scores_<key>` of fields to write, with one value per row: 0 where not scored.

        A field that exists already, a process reward model's, is kept.
        """
        for key in keys:
            if key not in self.token_scores:
                column = self.column(key, "algorithm.rewards.keys")
                yield TOKEN_FIELD + key, torch.from_numpy(rows.give(np.nan_to_num(column, nan=0.0))).float()

    @cached_property
    def _seen_in_infos(self) -> set[str]:
        return set().union(*self.infos)

    def names(self) -> list[str]:
        """The valid names: all numeric components, and the score, which every batch has."""
        names = {SCORE, *self.token_scores}
        for info in self.infos:
            names.update(str(key) for key, value in info.items() if _is_number(value))
        for key, values in self.fields.items():
            if key not in RESERVED and _length(values) and _is_number(next(iter(values))):
                names.add(str(key))
        return sorted(names)

    def column(self, key: str, setting: str) -> Array:
        """`[N]` values; NaN means "not scored". `setting` is the setting that names the key."""
        if key in self.token_scores:
            return self.token_scores[key]()
        if key in self._seen_in_infos:
            values = [info.get(key) for info in self.infos]
            missing = [row for row, value in enumerate(values) if value is None]
            if missing:
                raise DataError(
                    f"reward {key!r} ({setting}) is missing from {len(missing)} of {len(values)} samples, first of uid "
                    f"{self.labels[missing[0]]!r}, which has {listed(self.infos[missing[0]])}: the reward function "
                    "must return the same keys for every sample, NaN for 'not scored'"
                )
            return self._numbers(key, values)
        if key in self.fields:
            return self._numbers(key, self._taken(key))
        raise ConfigurationError(f"{setting}: {unknown('reward component', key, self.names())}")

    def _taken(self, key: str) -> Any:
        """A field's entries for the scored rows."""
        values = self.fields[key]
        size = len(self.labels) if self.rows is None else len(self.rows.owner)
        if (length := _length(values)) != size:
            what = repr(values) if length is None else f"{type(values).__name__} of length {length}"
            raise DataError(f"reward {key!r} is {what}, expected {size} numbers: one per row of the batch")
        if self.rows is None or self.rows.plain:
            return values
        if isinstance(values, np.ndarray | torch.Tensor):
            return values[self.rows.scored]
        return [values[row] for row in self.rows.scored.tolist()]

    def _numbers(self, key: str, values: Any) -> Array:
        """The values as floats, one per trajectory."""
        if isinstance(values, torch.Tensor):
            values = values.detach().to(torch.float64).cpu().numpy()
        elif not (isinstance(values, np.ndarray) and values.dtype.kind in "biuf"):
            values = self._checked(key, list(values))
        if values.dtype.kind not in "biuf":
            raise DataError(f"reward {key!r} holds {values.dtype} ({values.flat[0]!r}), expected numbers")
        column: Array = values.astype(np.float64)
        if column.shape == (len(self.labels), 1):
            column = column[:, 0]
        if column.shape != (len(self.labels),):
            raise DataError(f"reward {key!r} has shape {column.shape}, expected ({len(self.labels)},): one per sample")
        return column

    def _checked(self, key: str, values: list[Any]) -> np.ndarray[Any, Any]:
        kinds = set(map(type, values))
        if not all(issubclass(kind, _NUMBER) for kind in kinds):
            wrong = next((row for row, value in enumerate(values) if not _is_number(value)), None)
            if wrong is not None:
                raise DataError(
                    f"reward {key!r} of uid {self.labels[wrong]!r} is {values[wrong]!r} "
                    f"({type(values[wrong]).__name__}), expected one number per sample (NaN for 'not scored')"
                )
        try:
            plain = [value.item() if isinstance(value, np.ndarray | torch.Tensor) else value for value in values]
            return np.array([float(value) for value in plain], dtype=np.float64)
        except OverflowError as error:  # an integer beyond float64's range
            raise DataError(f"reward {key!r} holds a number too large for float64: {error}") from error


def token_totals(name: str, field: torch.Tensor, mask: torch.Tensor) -> Array:
    """`[B]` sums over the response of a batch field with one value per token."""
    shape = tuple(field.shape) if isinstance(field, torch.Tensor) else type(field).__name__
    if shape != tuple(mask.shape):
        raise DataError(f"batch field {name!r} is {shape}, expected a tensor {tuple(mask.shape)} like response_mask")
    return scores(field, mask)


def _length(values: Any) -> int | None:
    """The number of entries; None if the value is not a list of entries."""
    try:
        return None if isinstance(values, str | Mapping) else len(values)
    except TypeError:  # a number, or an array without dimensions
        return None


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "biuf"
    return isinstance(value, _NUMBER)
