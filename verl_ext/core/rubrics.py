"""Rubrics: rewards that are a list of criteria, whose number and weights depend on the prompt."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_ext.core.groups import Array, Index, label_text
from verl_ext.errors import ConfigurationError, DataError


def rubric(entries: Iterable[float], weights: Iterable[float] | None = None) -> str:
    """Encode the criteria of a response, each with its weight, as text for the result of a reward function.

    verl can pass text from a reward function to the trainer, but no lists of different lengths.

    >>> rubric([1, 0.5], weights=[5, -3])
    '[[1.0, 5.0], [0.5, -3.0]]'
    """
    for name, given in {"criteria": entries, "weights": weights}.items():
        if isinstance(given, str | bytes | Mapping):
            raise DataError(
                f"The {name} of a rubric must be a list with one number per criterion, found {reprlib.repr(given)}. "
                "Return verl_ext.rubric([1.0, 0.0], weights=[2.0, 1.0]), for example."
            )
    values = list(map(float, entries))
    sizes = [1.0] * len(values) if weights is None else map(float, weights)
    return json.dumps(list(zip(values, sizes, strict=True)))


@dataclass(frozen=True)
class Criteria:
    """A rubric: the criteria of each response. NaN: the criterion is not scored, or the prompt has fewer criteria."""

    values: Array
    """`[N, C]`."""
    factors: Array
    """`[N, C]` the weight of each criterion, divided by the sum of the absolute weights of the prompt."""

    @classmethod
    def of(cls, key: str, labels: Sequence[Hashable], texts: Sequence[Any]) -> Criteria:
        """Read what `rubric` returned for each response. All responses of a label must have the same weights.

        >>> Criteria.of("rubric", ["p", "q"], [rubric([1, 0], weights=[3, -1]), rubric([0.5])]).factors
        array([[ 0.75, -0.25],
               [ 1.  ,  0.  ]])
        """
        given: dict[Hashable, list[float]] = {}
        rows = []
        for label, text in zip(labels, texts, strict=True):
            where, pairs, size = f"The reward {key!r} of {label_text(label)}", [], 0.0
            with suppress(TypeError, ValueError, OverflowError, RecursionError):
                pairs = _pairs(json.loads(text))
                size = math.fsum(abs(weight) for _, weight in pairs)
            if not 0 < size < math.inf:
                raise DataError(
                    f"{where} is {text!r:.80}, but algorithm.rewards.rubrics names {key!r}, so it must be a rubric. "
                    f"{_remedy(key, text)}",
                    label=label,
                )
            weights = [weight for _, weight in pairs]
            if (others := given.setdefault(label, weights)) != weights:
                raise DataError(
                    f"{where} has the weights {others!r:.80} and {weights!r:.80} for responses to the same prompt. "
                    "Return the same criteria with the same weights for each response to a prompt.",
                    label=label,
                )
            rows.append([(value, weight / size) for value, weight in pairs])
        most = max(map(len, rows), default=0)
        padded = np.array([row + [(math.nan, 0.0)] * (most - len(row)) for row in rows])
        return cls(padded[:, :, 0], padded[:, :, 1])

    def __getitem__(self, rows: Index | slice) -> Criteria:
        return Criteria(self.values[rows], self.factors[rows])

    @property
    def total(self) -> Array:
        """`[N]` the weighted sum of the scored criteria, NaN where no criterion is scored."""
        return np.where(np.isnan(self.values).all(axis=1), np.nan, np.nansum(self.values * self.factors, axis=1))


def _remedy(key: str, value: object) -> str:
    """Return what to do about a value that is no rubric."""
    if isinstance(value, int | float | np.number):
        return (
            f"Remove {key!r} from algorithm.rewards.rubrics if the reward is one number per response. Otherwise return "
            "one number per criterion with verl_ext.rubric([...])."
        )
    return (
        "Return verl_ext.rubric([...], weights=[...]) with finite weights that are not all 0. For a prompt without "
        "criteria, return verl_ext.rubric([float('nan')])."
    )


def _pairs(entries: Any) -> list[tuple[float, float]]:
    """Return the value and the weight of each criterion, or raise `ValueError` for anything but pairs of numbers."""
    pairs = []
    for entry in entries:
        if not isinstance(entry, list):  # a text or a mapping can have two entries as well
            raise ValueError(f"found {entry!r}, expected a list of a value and a weight")
        value, weight = entry
        if isinstance(value, str) or isinstance(weight, str):
            raise ValueError(f"found {entry!r}, expected two numbers")
        pairs.append((float(value), float(weight)))
    return pairs


def to_columns(keys: Sequence[str], rewards: Sequence[Array | Criteria]) -> dict[str, Any]:
    """Return rewards as arguments of `Batch.of`. A rubric has one column per criterion.

    >>> to_columns(["correct", "rubric"], [np.array([1.0]), Criteria.of("rubric", ["p"], [rubric([0, 1])])])["keys"]
    ['correct', 'rubric[0]', 'rubric[1]']
    """
    widths = [reward.values.shape[1] if isinstance(reward, Criteria) else 0 for reward in rewards]
    named = {
        key: [f"{key}[{place}]" for place in range(width)] or [key] for key, width in zip(keys, widths, strict=True)
    }
    columns = [name for names in named.values() for name in names]
    if len({*columns}) < len(columns):
        clash = next(name for name in columns if columns.count(name) > 1)
        raise ConfigurationError(
            f"algorithm.rewards.keys={list(keys)}: the reward name {clash!r} collides with a criterion of a rubric. "
            "Return this reward under another name, and use the new name in algorithm.rewards."
        )
    factors = [reward.factors if isinstance(reward, Criteria) else np.ones(len(reward)) for reward in rewards]
    return {
        "rewards": np.column_stack([reward.values if isinstance(reward, Criteria) else reward for reward in rewards]),
        "keys": columns,
        "column_keys": [key for key, names in named.items() for _ in names],
        "factors": np.column_stack(factors) if any(widths) else None,
    }
