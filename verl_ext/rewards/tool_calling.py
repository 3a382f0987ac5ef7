r"""Format and correctness of tool calls: the reward of ToolRL, which GDPO's main experiment uses.

A ground truth is a whole response, `<think>...</think>\n<tool_call>\n{...}\n</tool_call>`, with a section
`<response>...</response>` after the tool calls or instead of them. The components are:

- `format`, 0 or 1: the stripped response has the sections of the ground truth and nothing else.
- `correctness`, -3 to 3: 6 * s / t - 3. Here s is the overlap of the tool names plus, for each true call, the overlap
  of the parameter names and the number of equal values in the matched predicted call, and t is s for a full match. The
  value is -3 if the first tool_call block of the response cannot be read, and 0 if the ground truth calls no tool.
- `length`, 0 to 1, optional: number of words of the last think section / 512, rounded to 2 places.

The formula is ToolRL's. It has two consequences:

- Guessing can pay off. For one call with two parameters, five calls of which one is correct score 2.8 in total, and one
  call with one incorrect value scores 2.5. So guessing pays off for a model that is correct in fewer than one of five
  cases.
- A call inside the think section receives full correctness, but no format reward. A condition on `format` does not
  help, because it would give such responses 0, which is more than the -3 of an incorrect call.

Values are compared as in Python, so `1`, `1.0` and `true` are equal. Time is linear in the length of the response.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

from verl_ext.rewards.options import KWARGS, ExtraInfo, bad_truth, parse_options, require_package, row_name, truth_text
from verl_ext.rewards.tags import Section, describe, first_block, follows_layout, has_both_tags, last_block

Call = dict[str, Any]
"""A parsed call: `{"name": ..., "parameters": {...}}`, possibly with more keys."""
_THINK = Section("think")
_TOOL_CALL = Section("tool_call", own_lines=True)
_RESPONSE = Section("response")

LAYOUTS = ((_THINK, _TOOL_CALL), (_THINK, _RESPONSE), (_THINK, _TOOL_CALL, _RESPONSE))
"""The layouts of a response that ToolRL's prompt allows."""


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `compute_score`.

    - `matching`: `greedy` (the reference code) assigns to each true call in order the best remaining predicted call.
      `optimal` (the paper) uses the assignment with the highest total, and needs scipy.
    - `length`: `omitted`, or `fixed` to add the component `length` (ToolRL's WITHLENGTH).
    """

    matching: Literal["greedy", "optimal"] = "greedy"
    length: Literal["omitted", "fixed"] = "omitted"

    def __post_init__(self) -> None:
        if self.matching == "optimal":
            require_package("scipy", "scipy>=1.10", f"{KWARGS}.matching='optimal'")

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the rewards that `compute_score` returns in addition to `score`."""
        return ("format", "correctness") if self.length == "omitted" else ("format", "correctness", "length")

    @property
    def accuracies(self) -> tuple[str, ...]:
        """Names of the rewards whose values lie in [0, 1], so that they can be used as the accuracy."""
        return tuple(name for name in self.components if name != "correctness")


@dataclass(frozen=True)
class Truth:
    """A parsed ground truth: the sections of the response, and its calls if there are any."""

    sections: tuple[Section, ...]
    calls: tuple[Call, ...] | None


def check_ground_truth(ground_truth: object, row: str = "a row") -> Truth:
    """Parse the ground truth, or raise `DataError`, which names the row, if it is invalid."""
    text = truth_text(row, ground_truth)
    wanted = [section for section in (_TOOL_CALL, _RESPONSE) if f"<{section.tag}>" in text]
    sections = (_THINK, *wanted)
    if not follows_layout(text, sections):
        raise bad_truth(row, "is not a well-formed response itself", ground_truth, describe(sections))
    if _TOOL_CALL not in sections:
        return Truth(sections, None)
    try:
        return Truth(sections, tuple(read_true_calls(first_block(text, _TOOL_CALL.tag))))
    except UnreadableCallsError as error:
        expected = '{"name": "...", "parameters": {...}} on each line'
        raise bad_truth(row, f"cannot be read, because {error}", ground_truth, expected) from error


def compute_score(
    data_source: object, solution_str: str, ground_truth: object, extra_info: ExtraInfo = None, **kwargs: object
) -> dict[str, float]:
    r"""Return `format`, `correctness`, optionally `length`, and `score`, their sum.

    >>> truth = '<think> t </think>\n<tool_call>\n{"name": "f", "parameters": {"a": 1}}\n</tool_call>'
    >>> compute_score("rlla", truth, truth)
    {'format': 1.0, 'correctness': 3.0, 'score': 4.0}
    """
    options = parse_options(Options, kwargs)
    truth = check_ground_truth(ground_truth, row_name(data_source, extra_info))
    answer = solution_str.strip()
    components = {"format": float(follows_layout(answer, truth.sections)), "correctness": 0.0}
    if truth.calls is not None:
        components["correctness"] = 6 * agreement(options, list(truth.calls), answer) - 3
    if options.length == "fixed":
        words = last_block(answer, _THINK.tag).split() if has_both_tags(answer, _THINK.tag) else []
        components["length"] = min(1.0, round(len(words) / 512, 2))  # the number of words is ToolRL's
    return {**components, "score": sum(components.values())}


def agreement(options: Options, true: list[Call], answer: str) -> float:
    """Return s / t of the formula of `correctness`, between 0 and 1, or 0 if the calls of the response cannot be read.

    s counts names of tools, names of parameters and equal values, and t is s for a full match.
    """
    if not has_both_tags(answer, _TOOL_CALL.tag):
        return 0.0
    try:
        predicted = read_calls(first_block(answer, _TOOL_CALL.tag))
        if true == predicted:
            return 1.0
        assign = optimal if options.matching == "optimal" else greedy
        matches = matched(true, predicted, assign)
        names = overlap([call["name"] for call in true], [call["name"] for call in predicted])
    except (UnreadableCallsError, RecursionError):
        return 0.0
    best_matches = sum(1 + len(call["parameters"]) for call in true)
    return (names + matches) / (1 + best_matches)


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
