"""Rubrics: rewards that are a list of criteria, whose number and weights depend on the prompt.

A worked example with two prompts and two responses to each. The rubric of prompt "p" has three criteria with the
weights 2, 1 and -1. The criterion with the negative weight describes a mistake. The rubric of prompt "q" has two
criteria with the weights 6 and 2. For each response, the reward function returns how far the response meets each
criterion, together with the weights of the prompt. NaN means that a criterion is not scored for this response, for
example because the judge failed.

>>> nan = float("nan")
>>> texts = [
...     rubric([1, 0.5, 0], weights=[2, 1, -1]),  # p
...     rubric([0, 1, 1], weights=[2, 1, -1]),  # p
...     rubric([0, 1], weights=[6, 2]),  # q
...     rubric([1, nan], weights=[6, 2]),  # q
... ]
>>> texts[0]
'[[1.0, 2.0], [0.5, 1.0], [0.0, -1.0]]'

`Criteria.of` makes two arrays of these texts, with one row per response and one column per criterion. Prompt "p" has
the most criteria, so there are three columns. Prompt "q" has no third criterion, so its value there is NaN, as if it
were not scored. A 0 would stand for a criterion that no response meets.

>>> criteria = Criteria.of("rubric", ["p", "p", "q", "q"], texts)
>>> criteria.values
array([[1. , 0.5, 0. ],
       [0. , 1. , 1. ],
       [0. , 1. , nan],
       [1. , nan, nan]])

A criterion weight is a weight divided by the sum of the absolute weights of its prompt, which is 2 + 1 + 1 = 4 for "p"
and 6 + 2 = 8 for "q". So the value of a rubric has the same scale for every prompt, whatever the number of its criteria
and the size of their weights. The weights are summed as absolute values because weights of opposite signs would cancel:
1 and -1 have the sum 0. The missing third criterion of "q" has the criterion weight 0, so it adds nothing to any sum.

>>> criteria.criterion_weights
array([[ 0.5 ,  0.25, -0.25],
       [ 0.5 ,  0.25, -0.25],
       [ 0.75,  0.25,  0.  ],
       [ 0.75,  0.25,  0.  ]])

The value of the rubric for a response is the sum of the criteria times their criterion weights:

- 1 * 0.5 + 0.5 * 0.25 + 0 * -0.25 = 0.625 for the first response to "p";
- 0 * 0.5 + 1 * 0.25 + 1 * -0.25 = 0 for the second response to "p", because of its mistake;
- 0 * 0.75 + 1 * 0.25 = 0.25 for the first response to "q";
- 1 * 0.75 = 0.75 for the second response to "q". A criterion that is not scored adds 0, and the weights of the
  others stay as they are.

>>> criteria.total
array([0.625, 0.   , 0.25 , 0.75 ])

`to_columns` puts the criteria next to the other rewards, each of which is one column with the criterion weight 1. Steps
before the sum of the rewards treat each column as a reward of its own. The weight of a column in this sum is its
criterion weight times the weight in `algorithm.rewards.weights`, which has one entry for `correct` and one for
`rubric`. `reward_of_column` says which entry that is.

>>> arguments = to_columns(["correct", "rubric"], [np.array([1.0, 0.0, 0.0, 1.0]), criteria])
>>> arguments["keys"]
['correct', 'rubric[0]', 'rubric[1]', 'rubric[2]']
>>> arguments["reward_of_column"]
['correct', 'rubric', 'rubric', 'rubric']
>>> arguments["rewards"][0], arguments["criterion_weights"][0]
(array([1. , 1. , 0.5, 0. ]), array([ 1.  ,  0.5 ,  0.25, -0.25]))
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
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
    float_weights = [1.0] * len(values) if weights is None else list(map(float, weights))
    if len(float_weights) != len(values):
        raise DataError(
            f"The rubric has {len(values)} criteria and {len(float_weights)} weights. Return one weight per criterion."
        )
    pairs = list(zip(values, float_weights, strict=True))
    return json.dumps(pairs)


@dataclass(frozen=True)
class Criteria:
    """One rubric for `N` responses, with at most `C` criteria per prompt."""

    values: Array
    """`[N, C]` how far each criterion is met, NaN if it is not scored or if the prompt has fewer criteria."""
    criterion_weights: Array
    """`[N, C]` the weight of each criterion, divided by the sum of the absolute weights of the prompt."""

    @classmethod
    def of(cls, key: str, labels: Sequence[Hashable], texts: Sequence[Any]) -> Criteria:
        """Read what `rubric` returned for each response. All responses of a label must have the same weights.

        >>> Criteria.of("rubric", ["p", "q"], [rubric([1, 0], weights=[3, -1]), rubric([0.5])]).criterion_weights
        array([[ 0.75, -0.25],
               [ 1.  ,  0.  ]])
        """
        values: list[list[float]] = []
        criterion_weights: list[list[float]] = []
        weights_by_label: dict[Hashable, list[float]] = {}
        for label, text in zip(labels, texts, strict=True):
            values_of_response, weights = _parse(key, label, text)
            expected_weights = weights_by_label.setdefault(label, weights)
            _check_same_weights(key, label, expected_weights, weights)
            absolute_sum = _absolute_sum(weights)
            values.append(values_of_response)
            criterion_weights.append([weight / absolute_sum for weight in weights])
        return cls(_padded(values, math.nan), _padded(criterion_weights, 0.0))

    def __getitem__(self, rows: Index | slice) -> Criteria:
        return Criteria(self.values[rows], self.criterion_weights[rows])

    @property
    def total(self) -> Array:
        """`[N]` the weighted sum of the scored criteria, NaN where no criterion is scored."""
        unscored = np.isnan(self.values).all(axis=1)
        weighted_sum = np.nansum(self.values * self.criterion_weights, axis=1)
        return np.where(unscored, np.nan, weighted_sum)


def _parse(key: str, label: Hashable, text: Any) -> tuple[list[float], list[float]]:
    """Return the values and the weights of a response's criteria.

    Raise unless the text is what `rubric` returns, with finite weights that are not all 0.
    """
    try:
        values, weights = _values_and_weights(json.loads(text))
        valid = 0 < _absolute_sum(weights) < math.inf
    except (TypeError, ValueError, OverflowError, RecursionError):
        valid = False
    if not valid:
        raise DataError(
            f"The reward {key!r} of {label_text(label)} is {text!r:.80}, but algorithm.rewards.rubrics names {key!r}, "
            f"so it must be a rubric. {_remedy(key, text)}",
            label=label,
        )
    return values, weights


def _values_and_weights(entries: Any) -> tuple[list[float], list[float]]:
    """Split pairs of numbers, or raise `TypeError`, `ValueError` or `OverflowError` for anything else."""
    values = []
    weights = []
    for entry in entries:
        if not isinstance(entry, list):  # a text or a mapping can have two entries as well
            raise ValueError(f"found {entry!r}, expected a list of a value and a weight")
        value, weight = entry
        if isinstance(value, str) or isinstance(weight, str):  # float() reads a text
            raise ValueError(f"found {entry!r}, expected two numbers")
        values.append(float(value))
        weights.append(float(weight))
    return values, weights


def _absolute_sum(weights: list[float]) -> float:
    return math.fsum(map(abs, weights))


def _remedy(key: str, value: object) -> str:
    """Return what to do about a value that is not a rubric."""
    if isinstance(value, int | float | np.number):
        return (
            f"Remove {key!r} from algorithm.rewards.rubrics if the reward is one number per response. Otherwise return "
            "one number per criterion with verl_ext.rubric([...])."
        )
    return (
        "Return verl_ext.rubric([...], weights=[...]) with finite weights that are not all 0. For a prompt without "
        "criteria, return verl_ext.rubric([float('nan')])."
    )


def _check_same_weights(key: str, label: Hashable, expected: list[float], weights: list[float]) -> None:
    """Raise unless a response has the weights of the first response to the same prompt."""
    if weights != expected:
        raise DataError(
            f"The reward {key!r} of {label_text(label)} has the weights {expected!r:.80} and {weights!r:.80} for "
            "responses to the same prompt. Return the same criteria with the same weights for each response to a "
            "prompt.",
            label=label,
        )


def _padded(rows: Sequence[Sequence[float]], padding: float) -> Array:
    """Pad `N` rows at their ends to the length `C` of the longest, and return them as an array `[N, C]`."""
    longest = max(map(len, rows), default=0)
    padded = np.full((len(rows), longest), padding)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def to_columns(keys: Sequence[str], rewards: Sequence[Array | Criteria]) -> dict[str, Any]:
    """Return rewards as arguments of `Batch.of`. A rubric has one column per criterion, any other reward one column.

    Without a rubric, there are no criterion weights, which stands for 1 each.

    >>> to_columns(["correct", "rubric"], [np.array([1.0]), Criteria.of("rubric", ["p"], [rubric([0, 1])])])["keys"]
    ['correct', 'rubric[0]', 'rubric[1]']
    """
    plain_rewards = [reward for reward in rewards if not isinstance(reward, Criteria)]
    if len(plain_rewards) == len(rewards):
        return {"rewards": np.column_stack(plain_rewards), "keys": keys}
    columns: list[str] = []
    reward_of_column: list[str] = []
    values: list[Array] = []
    criterion_weights: list[Array] = []
    for key, reward in zip(keys, rewards, strict=True):
        if isinstance(reward, Criteria):
            names = [f"{key}[{index}]" for index in range(reward.values.shape[1])]
            values.append(reward.values)
            criterion_weights.append(reward.criterion_weights)
        else:
            names = [key]
            values.append(reward)
            criterion_weights.append(np.ones(len(reward)))
        columns += names
        reward_of_column += [key] * len(names)
    _check_unique(keys, columns)
    return {
        "rewards": np.column_stack(values),
        "keys": columns,
        "reward_of_column": reward_of_column,
        "criterion_weights": np.column_stack(criterion_weights),
    }


def _check_unique(keys: Sequence[str], columns: list[str]) -> None:
    """Raise if a reward has the name of a criterion."""
    for name in columns:
        if columns.count(name) > 1:
            raise ConfigurationError(
                f"algorithm.rewards.keys={list(keys)}: the reward name {name!r} collides with a criterion of a rubric. "
                "Return this reward under another name, and use the new name in algorithm.rewards."
            )
