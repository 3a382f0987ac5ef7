"""Rewards by item: a list of criteria for each response, a rubric, whose number and weights are the prompt's."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_ext.core.groups import Array, Index
from verl_ext.errors import ConfigurationError, DataError


def rubric(entries: Iterable[float], weights: Iterable[float] | None = None) -> str:
    """The criteria of a response as text, each with its weight, for the result of a reward function.

    verl cannot carry lists of different lengths from a reward function to the trainer; text it can.

    >>> rubric([1, 0.5], weights=[5, -3])
    '[[1.0, 5.0], [0.5, -3.0]]'
    """
    for name, given in {"rubric": entries, "weights of rubric": weights}.items():
        if isinstance(given, str | bytes | Mapping):
            raise DataError(f"{name} must be a list with one number for each criterion, found {reprlib.repr(given)}")
    values = list(map(float, entries))
    sizes = [1.0] * len(values) if weights is None else map(float, weights)
    return json.dumps(list(zip(values, sizes, strict=True)))


@dataclass(frozen=True)
class Items:
    """A reward by item: the criteria of each response, NaN where one is not scored, or its prompt has fewer."""

    values: Array
    """`[N, C]`."""
    factors: Array
    """`[N, C]` what each counts: its weight over the sum of the sizes of the prompt's weights."""

    @classmethod
    def of(cls, key: str, labels: Sequence[Hashable], texts: Sequence[Any]) -> Items:
        """Read what `rubric` returned for each response; those of one label must have the same weights.

        >>> Items.of("rubric", ["p", "q"], [rubric([1, 0], weights=[3, -1]), rubric([0.5])]).factors
        array([[ 0.75, -0.25],
               [ 1.  ,  0.  ]])
        """
        given: dict[Hashable, list[float]] = {}
        rows = []
        for label, text in zip(labels, texts, strict=True):
            where, pairs, size = f"reward {key!r} of uid {label!r}", [], 0.0
            with suppress(TypeError, ValueError, OverflowError, RecursionError):
                pairs = _pairs(json.loads(text))
                size = math.fsum(abs(weight) for _, weight in pairs)
            if not 0 < size < math.inf:
                raise DataError(
                    f"{where} is {text!r:.80}, but algorithm.rewards.rubrics names it: return "
                    "verl_ext.rubric([...], weights=[...]), with finite weights that are not all 0. For a prompt "
                    "without criteria, return verl_ext.rubric([float('nan')])"
                )
            weights = [weight for _, weight in pairs]
            if (others := given.setdefault(label, weights)) != weights:
                raise DataError(
                    f"{where} has the weights {others!r:.80} and {weights!r:.80}: return the same "
                    "criteria, with the same weights, for each response to a prompt"
                )
            rows.append([(value, weight / size) for value, weight in pairs])
        most = max(map(len, rows), default=0)
        padded = np.array([row + [(math.nan, 0.0)] * (most - len(row)) for row in rows])
        return cls(padded[:, :, 0], padded[:, :, 1])

    def __getitem__(self, rows: Index | slice) -> Items:
        return Items(self.values[rows], self.factors[rows])

    @property
    def total(self) -> Array:
        """`[N]` the weighted sum of the scored criteria; NaN where none is scored."""
        return np.where(np.isnan(self.values).all(axis=1), np.nan, np.nansum(self.values * self.factors, axis=1))


def _pairs(entries: Any) -> list[tuple[float, float]]:
    """The value and the weight of each criterion; raise `ValueError` unless each is a list of two numbers."""
    pairs = []
    for entry in entries:
        if not isinstance(entry, list):  # a text or a mapping can have two entries, too
            raise ValueError(f"found {entry!r}, expected a list of a value and a weight")
        value, weight = entry
        if isinstance(value, str) or isinstance(weight, str):
            raise ValueError(f"found {entry!r}, expected two numbers")
        pairs.append((float(value), float(weight)))
    return pairs


def spread(keys: Sequence[str], rewards: Sequence[Array | Items]) -> dict[str, Any]:
    """Return some rewards as `Batch.of` takes them, those by item with a column for each criterion.

    >>> spread(["right", "rubric"], [np.array([1.0]), Items.of("rubric", ["p"], [rubric([0, 1])])])["keys"]
    ['right', 'rubric[0]', 'rubric[1]']
    """
    widths = [reward.values.shape[1] if isinstance(reward, Items) else 0 for reward in rewards]
    named = {
        key: [f"{key}[{place}]" for place in range(width)] or [key] for key, width in zip(keys, widths, strict=True)
    }
    columns = [name for names in named.values() for name in names]
    if len({*columns}) < len(columns):
        raise ConfigurationError(f"algorithm.rewards.keys={list(keys)}: a reward has the name of another's criterion")
    factors = [reward.factors if isinstance(reward, Items) else np.ones(len(reward)) for reward in rewards]
    return {
        "rewards": np.column_stack([reward.values if isinstance(reward, Items) else reward for reward in rewards]),
        "keys": columns,
        "column_keys": [key for key, names in named.items() for _ in names],
        "factors": np.column_stack(factors) if any(widths) else None,
    }
