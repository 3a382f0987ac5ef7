"""Read tool calls, one JSON object per line, and measure the agreement of two lists of calls."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

Call = dict[str, Any]
"""A parsed call: `{"name": ..., "parameters": {...}}`, possibly with more keys."""
Weights = list[list[float]]
"""Weight of matching true call i (row) with predicted call j (column)."""


class UnreadableCallsError(ValueError):
    """A block of tool calls is invalid."""


def read_calls(block: str) -> list[Call]:
    """Read the calls of a response. Raise `UnreadableCallsError` unless each line is an object with a name.

    Names and parameters are not checked here, because they are read only where they are compared.
    """
    calls = []
    for number, line in enumerate(block.strip().split("\n"), start=1):
        try:
            call = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UnreadableCallsError(f"tool call {number} is not JSON on one line ({error})") from error
        if not isinstance(call, dict) or "name" not in call:
            raise UnreadableCallsError(f"tool call {number} is not an object with a 'name'")
        calls.append(call)
    return calls


def read_true_calls(block: str) -> list[Call]:
    """Read the calls of a ground truth. Raise `UnreadableCallsError` with the invalid call and the reason."""
    calls = read_calls(block)
    for number, call in enumerate(calls, start=1):
        for key, kind, word in (("name", str, "string"), ("parameters", dict, "object")):
            if not isinstance(call.get(key), kind):
                raise UnreadableCallsError(f"tool call {number} has no {word} {key!r}")
    return calls


def overlap(true: Sequence[str], predicted: Sequence[Any]) -> float:
    """Return the multiset Jaccard index: common names / (all names - common names), 1 if both are empty.

    Raise `UnreadableCallsError` if a name is a list or an object, which cannot be counted.

    >>> overlap(["f", "f", "g"], ["g", "f"])  # 2 common of 3 + 2 - 2
    0.6666666666666666
    """
    if any(isinstance(name, list | dict) for name in predicted):
        raise UnreadableCallsError("the name of a predicted call is a list or an object")
    return _jaccard((Counter(true) & Counter(predicted)).total(), len(true), len(predicted))


def _jaccard(common: int, true: int, predicted: int) -> float:
    return common / (true + predicted - common) if true or predicted else 1.0


def parameter_score(true: Call, predicted: Call) -> float:
    """Return the overlap of the parameter names plus the number of equal values."""
    wanted, given = true["parameters"], predicted.get("parameters")
    if not isinstance(given, dict):
        raise UnreadableCallsError("a predicted call has no object 'parameters'")
    common = [name for name in wanted if name in given]  # each name occurs once, so no counting as in `overlap`
    names = _jaccard(len(common), len(wanted), len(given))
    equal: int = sum(given[name] == wanted[name] for name in common)
    return names + equal


def greedy(weights: Weights) -> float:
    """Return the total weight if each row in order takes the remaining column with the largest weight.

    Of equal weights the first column is taken. A row whose weights are all 0 takes no column.

    >>> greedy([[2, 4 / 3], [3, 4 / 3]])  # 2 + 4/3
    3.333333333333333
    """
    taken: set[int] = set()
    total = 0.0
    for row in weights:
        best, column = 0.0, -1
        for index, weight in enumerate(row):
            if weight > best and index not in taken:
                best, column = weight, index
        taken.add(column)
        total += best
    return total


def optimal(weights: Weights) -> float:
    """Return the maximum total weight of an assignment of rows to columns, 13/3 for the example of `greedy`."""
    solver = import_module("scipy.optimize")  # imported here because it takes about a second
    rows, columns = solver.linear_sum_assignment(weights, maximize=True)
    return float(sum(weights[row][column] for row, column in zip(rows, columns, strict=True)))


def matched(true: Sequence[Call], predicted: Sequence[Call], assign: Callable[[Weights], float]) -> float:
    """Return the total parameter score of matching true calls with predicted calls of the same tool."""
    candidates: dict[str, list[Call]] = {call["name"]: [] for call in true}
    for call in predicted:
        if isinstance(call["name"], str) and call["name"] in candidates:
            candidates[call["name"]].append(call)
    total = 0.0
    for name, calls in candidates.items():
        wanted = [call for call in true if call["name"] == name]
        if calls:
            total += assign([[parameter_score(call, other) for other in calls] for call in wanted])
    return total
