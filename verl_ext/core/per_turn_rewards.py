"""Per-turn rewards as a reward function returns them: a list with one number per turn, encoded as text."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from verl_ext.core.groups import Array, Bools, Index, label_text
from verl_ext.errors import DataError


def per_turn(entries: Iterable[float]) -> str:
    """Encode the rewards of a response's turns as text for the result of a reward function.

    verl can pass text from a reward function to the trainer, but no lists of different lengths.

    >>> per_turn([1, 0.5])
    '[1.0, 0.5]'
    """
    if isinstance(entries, str | bytes | Mapping):
        raise DataError(
            f"per_turn takes a list with one number per turn, found {reprlib.repr(entries)}. Return "
            "verl_ext.per_turn([0.0, 1.0]), for example."
        )
    numbers = [float(entry) for entry in entries]
    return json.dumps(numbers)


def pad_entries(
    key: str, labels: Sequence[Hashable], lists: Sequence[Any], turns: Index, truncated: Bools, *, text: bool
) -> tuple[Array, Index]:
    """Pad each response's list with 0 to its number of turns, and concatenate. Also return the lengths before padding.

    With `text` a list must be what `per_turn` returns. `turns` is the number of turns of each response, and
    `truncated` says whether a response was truncated at its length limit. The list of a truncated response may be
    longer than its number of turns, and is truncated as well. Any other list that is too long is an error.

    >>> pad_entries("tool", ["p", "q"], ["[1.0]", "[2, 3]"], np.array([2, 1]), np.array([False, True]), text=True)
    (array([1., 0., 2.]), array([1, 2]))
    """
    padded: list[float] = []
    lengths: list[int] = []
    for label, value, turn_count, is_truncated in zip(labels, lists, turns.tolist(), truncated.tolist(), strict=True):
        entries = _decode(value, text=text)
        if entries is None:
            raise DataError(
                f"The reward {key!r} of {label_text(label)} is {reprlib.repr(value)}, but algorithm.rewards.per_turn "
                f"names {key!r}, so it must have one number per turn. {_remedy(key, value)}",
                label=label,
            )
        if len(entries) > turn_count and not is_truncated:
            raise DataError(
                f"The reward {key!r} of {label_text(label)} has {len(entries)} entries, but the response has "
                f"{turn_count} turns (contiguous spans of generated tokens). Return one number per turn with "
                "verl_ext.per_turn([...]).",
                label=label,
            )
        lengths.append(len(entries))
        missing_entries = turn_count - len(entries)  # negative for a truncated response with too many entries
        padded += entries[:turn_count]
        padded += [0.0] * missing_entries
    return np.array(padded, dtype=np.float64), np.array(lengths, dtype=np.intp)


def _decode(value: object, *, text: bool) -> list[float] | None:
    """Return the numbers in a list or in its text, or None if the value is neither. With `text` it must be text."""
    if text and not isinstance(value, str):
        return None
    try:
        entries = json.loads(value) if isinstance(value, str) else value
        if not isinstance(entries, list) or any(isinstance(entry, str) for entry in entries):
            return None  # float() would read a text such as "1.0"
        return [float(entry) for entry in entries]
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _remedy(key: str, value: object) -> str:
    """Return what to do about a value that has no numbers per turn."""
    if isinstance(value, int | float | np.number):
        return (
            f"Remove {key!r} from algorithm.rewards.per_turn if the reward is one number per response. Otherwise "
            "return one number per turn with verl_ext.per_turn([...])."
        )
    return "Return verl_ext.per_turn([...]) with one number per turn."
