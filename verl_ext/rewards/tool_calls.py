"""Tool calls written as one JSON object a line: reading them, and how far two lists of them agree."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

#: A call as it was read: `{"name": ..., "parameters": {...}}`, possibly with more keys.
Call = dict[str, Any]

#: Weight of matching true call i (row) with predicted call j (column).
Weights = list[list[float]]

# Python's own limit since 3.11; reading an integer takes quadratic time without one.
_MAX_DIGITS = 4300


class UnreadableCallsError(ValueError):
    """A block of tool calls is not what it should be."""


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


# An answer may say NaN and repeat a key, as Python's json allows. A ground truth may not: NaN does not equal itself.
_LENIENT = json.JSONDecoder(parse_int=_integer)
_STRICT = json.JSONDecoder(parse_int=_integer, parse_constant=_constant, object_pairs_hook=_object)


def read_calls(block: str) -> list[Call]:
    """The calls of an answer's block; `UnreadableCallsError` unless each line is an object with a name.

    Lenient beyond that: the parameters are looked at only where they are compared. Nesting too deep for Python's reader
    raises its own RecursionError.
    """
    calls = []
    for line in block.strip().split("\n"):
        try:
            call = _LENIENT.decode(line)
        except ValueError as error:
            raise UnreadableCallsError(f"a line is not JSON ({error})") from error
        if not isinstance(call, dict) or isinstance(call.get("name", []), list | dict):
            raise UnreadableCallsError("a line is not an object with a name")
        calls.append(call)
    return calls


def read_true_calls(block: str) -> list[Call]:
    """The calls of a ground truth's block; `UnreadableCallsError` says what is wrong with which call."""
    calls = []
    for number, line in enumerate(block.strip().split("\n"), start=1):
        try:
            call = _STRICT.decode(line)
        except (ValueError, RecursionError) as error:
            raise UnreadableCallsError(f"tool call {number} is not one JSON object on one line ({error})") from error
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise UnreadableCallsError(f"tool call {number} has no 'name' that is a string")
        if not isinstance(call.get("parameters"), dict):
            raise UnreadableCallsError(f"tool call {number} has no 'parameters' that are an object")
        calls.append(call)
    return calls


def overlap(true: Sequence[str], predicted: Sequence[Any], *, ordered: bool = False) -> float:
    """Multiset Jaccard index: common names / (all names - common names), 1 if both are empty.

    With `ordered`, 1 for equal lists and 0 for any others.

    >>> overlap(["f", "f", "g"], ["g", "f"])  # 2 common of 3 + 2 - 2
    0.6666666666666666
    """
    if ordered:
        return float(true == predicted)
    left = Counter(true)  # and no Counter(predicted): a model could choose numbers whose hashes collide
    common = 0
    for name in predicted:
        if left[name] > 0:
            left[name] -= 1
            common += 1
    return _jaccard(common, len(true), len(predicted))


def _jaccard(common: int, true: int, predicted: int) -> float:
    return common / (true + predicted - common) if true or predicted else 1.0


def parameter_score(true: Call, predicted: Call, *, ordered: bool = False) -> float:
    """Overlap of the parameter names plus the number of equal values."""
    wanted, given = true["parameters"], predicted.get("parameters")
    if not isinstance(given, dict):
        raise UnreadableCallsError("a call that is compared has no object of parameters")
    common = [name for name in wanted if name in given]  # names occur once, so this is `overlap` without counting
    names = float(list(wanted) == list(given)) if ordered else _jaccard(len(common), len(wanted), len(given))
    equal: int = sum(given[name] == wanted[name] for name in common)
    return names + equal


def greedy(weights: Weights) -> float:
    """Total weight if each row in turn takes the heaviest column left, the first of equals; zero weights take none.

    >>> greedy([[2, 4 / 3], [3, 4 / 3]])  # 2 + 4/3
    3.333333333333333
    """
    taken: set[int] = set()
    total = 0.0
    for row in weights:
        best, column = 0.0, -1
        for at, weight in enumerate(row):
            if weight > best and at not in taken:
                best, column = weight, at
        taken.add(column)
        total += best
    return total


def optimal(weights: Weights) -> float:
    """Largest total weight of an assignment of rows to columns: 13/3 for the weights above."""
    solver = import_module("scipy.optimize")  # a second of import, only where it is asked for
    rows, columns = solver.linear_sum_assignment(weights, maximize=True)
    return float(sum(weights[row][column] for row, column in zip(rows, columns, strict=True)))


def matched(
    true: Sequence[Call],
    predicted: Sequence[Call],
    weight: Callable[[Call, Call], float],
    assign: Callable[[Weights], float],
) -> float:
    """Total weight of matching true with predicted calls of the same tool."""
    candidates: dict[str, list[Call]] = {call["name"]: [] for call in true}
    for call in predicted:
        if call["name"] in candidates:
            candidates[call["name"]].append(call)
    total = 0.0
    for name, found in candidates.items():
        if found:
            total += assign([[weight(call, other) for other in found] for call in true if call["name"] == name])
    return total
