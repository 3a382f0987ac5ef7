"""The batch as an estimator sees it: one row per trajectory, and the number of its tokens."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from verl_ext.core.groups import Array, Bools, Groups
from verl_ext.errors import ConfigurationError, DataError

# The square of a larger reward, or its advantage in float32, would overflow.
LARGEST_REWARD = 1e30

# Floats count exactly up to this number.
MOST_TOKENS = 2.0**53

Counts = Sequence[float] | Array


@dataclass(frozen=True)
class Batch:
    """Trajectories with their rewards; NaN means "not scored".

    >>> batch = Batch.of([[1.0], [0.0]], ["g", "g"])
    >>> batch.rewards.shape, batch.keys, len(batch.groups)
    ((2, 1), ('score',), 1)
    """

    rewards: Array
    """`[N, K]` components before any weighting."""
    keys: tuple[str, ...]
    """`K` names of the components."""
    groups: Groups
    accuracy: Array | None = None
    """`[N]` in [0, 1], for the steps that weigh by difficulty."""
    kl_reward: Array | None = None
    """`[N]` the KL part of the reward; it is added to the combined reward only."""
    count_tokens: Callable[[], Counts] | None = None
    """Returns the lengths. Called only when a step needs them, because it reads the whole mask."""

    @cached_property
    def lengths(self) -> Array:
        """`[N]` response tokens that count in the loss, over all outputs of the trajectory."""
        size = len(self.rewards)
        return np.ones(size) if self.count_tokens is None else _lengths(self.count_tokens(), size)

    def accuracy_for(self, step: str) -> Array:
        """`[N]` the accuracy, or an error that names the step which needs it."""
        if self.accuracy is None:
            raise ConfigurationError(
                f"step {step!r} needs an accuracy in [0, 1] for each trajectory, but there is none"
            )
        return self.accuracy

    @cached_property
    def variation(self) -> tuple[Array, Bools]:
        """`[G, K]` mean of each reward in each group, and whether it varies there."""
        return self.groups.variation(self.rewards)

    @classmethod
    def of(
        cls,
        rewards: Sequence[Sequence[float]] | Array,
        labels: Sequence[Hashable],
        *,
        groups: Groups | None = None,
        keys: Sequence[str] = ("score",),
        lengths: Counts | Callable[[], Counts] | None = None,
        accuracy: Sequence[float] | Array | None = None,
        kl_reward: Array | None = None,
    ) -> Batch:
        """Check the shapes and that the rewards are finite, then build the batch.

        `labels` are the prompts' uids. Pass `groups` if they are already grouped. `lengths` default to 1 each.
        """
        size = len(labels)
        matrix = _shaped("rewards", rewards, (size, len(keys)), keys)
        check_finite(matrix, keys, labels)
        batch = cls(
            rewards=matrix,
            keys=tuple(keys),
            groups=Groups.of(labels) if groups is None else groups,
            accuracy=None if accuracy is None else _accuracy(accuracy, size),
            kl_reward=None if kl_reward is None else _shaped("kl_reward", kl_reward, (size,)),
            count_tokens=lengths if lengths is None or callable(lengths) else lambda: lengths,
        )
        if not callable(lengths):
            batch.lengths  # noqa: B018 - raises for a wrong shape
        if batch.kl_reward is not None:
            _check_kl_reward(batch.kl_reward, matrix, labels)
        return batch


def check_finite(matrix: Array, keys: Sequence[str], labels: Sequence[Hashable]) -> None:
    """Raise for an infinite or huge reward, naming its component and uid. NaN is allowed: it means "not scored"."""
    size = np.abs(matrix)
    if np.fmax.reduce(size, axis=None, initial=0.0) > LARGEST_REWARD:
        broken = size > LARGEST_REWARD
        row, column = np.argwhere(broken)[0]
        raise DataError(
            f"reward {keys[column]!r} of uid {labels[row]!r} is {matrix[row, column]} (row {row}, "
            f"{int(broken.sum())} such values in total): a reward must be finite and at most {LARGEST_REWARD:g} in "
            "size, or NaN for 'not scored'"
        )


def unit_accuracy(
    values: Array, labels: Sequence[Hashable], *, key: str, threshold: float | None, where: str = ""
) -> Array:
    """Accuracy in [0, 1]; with a threshold, `values > threshold` is 1 and the rest 0. NaN stays NaN.

    >>> unit_accuracy(np.array([-1.0, 1.0]), ["a", "a"], key="score", threshold=0.0)
    array([0., 1.])
    """
    if threshold is not None:
        check_finite(values[:, None], [key], labels)
        return np.where(np.isnan(values), np.nan, (values > threshold).astype(np.float64))
    # fmin and fmax skip NaN. If every value is NaN, both comparisons below are False.
    low, high = np.fmin.reduce(values, initial=np.nan), np.fmax.reduce(values, initial=np.nan)
    if low < -1e-6 or high > 1 + 1e-6:
        check_finite(values[:, None], [key], labels)  # names the row
        prefix = f"{where}." if where else ""
        raise ConfigurationError(
            f"accuracy must lie in [0, 1], but {key!r} ranges over [{low:g}, {high:g}]: name another "
            f"component with {prefix}accuracy_key, or set {prefix}accuracy_threshold=t, which counts values above t as "
            "right (t=0 for a scorer that returns -1 and 1)"
        )
    return values if low >= 0 and high <= 1 else np.clip(values, 0.0, 1.0)


def _check_kl_reward(kl_reward: Array, rewards: Array, labels: Sequence[Hashable]) -> None:
    """Raise if the KL part of a row is not finite, unless none of the row's rewards is scored."""
    broken = np.flatnonzero(~(np.abs(kl_reward) <= LARGEST_REWARD) & ~np.isnan(rewards).all(axis=1))
    if len(broken):
        row = int(broken[0])
        raise DataError(
            f"the KL part of the reward of uid {labels[row]!r} is {kl_reward[row]} (row {row}, {len(broken)} such rows "
            "in total), expected a finite number: look for NaN or infinite log probabilities, policy or reference, and "
            "for a score that is not finite"
        )


def _accuracy(values: Sequence[float] | Array, size: int) -> Array:
    """`[N]` accuracies in [0, 1]; NaN is allowed."""
    accuracy = _shaped("accuracy", values, (size,))
    _check_range("accuracy", np.fmin.reduce(accuracy, initial=0.0), np.fmax.reduce(accuracy, initial=0.0), 1.0)
    return accuracy


def _lengths(values: Counts, size: int) -> Array:
    lengths = _shaped("lengths", values, (size,))
    # If a value is NaN, so are the minimum and the maximum.
    low, high = np.minimum.reduce(lengths, initial=0.0), np.maximum.reduce(lengths, initial=0.0)
    _check_range("lengths", low, high, MOST_TOKENS)
    return lengths


def _check_range(name: str, low: float, high: float, most: float) -> None:
    if not (low >= 0 and high <= most):
        wrong = next(value for value in (low, high) if not 0 <= value <= most)
        raise DataError(f"{name} must lie in [0, {most:g}], found {wrong:g}")


def _shaped(name: str, values: Sequence[Any] | Array, shape: tuple[int, ...], keys: Sequence[str] = ()) -> Array:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        found = _wrong_row(values, shape) or str(error)
        raise DataError(f"{name} cannot be read as numbers: {found}, {_expected(shape, keys)}") from error
    if array.shape != shape and not (array.size == 0 and 0 in shape):
        remedy = f": write {name}=[[value], ...]" if array.shape == shape[:1] and shape[1] == 1 else ""
        raise DataError(f"{name} has shape {array.shape}, {_expected(shape, keys)}{remedy}")
    return array.reshape(shape)


def _expected(shape: tuple[int, ...], keys: Sequence[str]) -> str:
    columns = f" and one column per key, {', '.join(map(repr, keys))}" if keys else ""
    return f"expected {shape}: one row per trajectory{columns}"


def _wrong_row(values: object, shape: tuple[int, ...]) -> str:
    """The first row that is not made of numbers or has another shape than the rest must have."""
    for at, row in enumerate(values if isinstance(values, Sequence | np.ndarray) else ()):
        try:
            found = np.asarray(row, dtype=np.float64).shape
        except (TypeError, ValueError, OverflowError):
            return f"row {at} is {reprlib.repr(row)}"
        if found != shape[1:]:
            return f"row {at} has shape {found}"
    return ""
