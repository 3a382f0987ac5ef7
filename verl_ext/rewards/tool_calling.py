r"""Format and correctness of tool calls: the reward of ToolRL, used in GDPO's main experiment.

A ground truth is a whole answer, `<think>...</think>\n<tool_call>\n{...}\n</tool_call>`, with a section
`<response>...</response>` after the tool calls or instead of them. Components:

- `format`, 0 or 1: the stripped answer has the sections of the ground truth and nothing else.
- `correctness`, -3 to 3: 6 * s / t - 3, where s is the overlap of the tool names plus, for each true call, the overlap
  of the parameter names and the number of equal values in its matched predicted call, and t is the same for a full
  match. -3 if the answer's first tool_call block cannot be read, 0 if the ground truth calls no tool.
- `length`, 0 to 1, optional: words of the last think section / target, rounded to 2 places.

The formula is ToolRL's, with two consequences:

- Guessing pays. For one call with two parameters, five calls of which one is right earn 2.8 in all, one call with one
  wrong value 2.5 (with `credit=per_call` 1.6 and 1.0), so guesses pay for a model that is right less than one time in
  five. `credit=exact` does not reward them.
- A call inside the think section earns full correctness, but no format. No argument changes that. A condition of gdpo
  on `format` does not help: it would give such answers 0, which is more than the -3 of a wrong call.

Values are compared as in Python, so `1`, `1.0` and `true` are equal. Time is linear in the length of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl_ext.core.typed import limited
from verl_ext.errors import ConfigurationError
from verl_ext.rewards.options import KWARGS, bad_truth, parse_options, require_package, row_name, truth_text
from verl_ext.rewards.tags import Section, describe, first_block, follows_layout, has_both_tags, last_block
from verl_ext.rewards.tool_calls import (
    Call,
    UnreadableCallsError,
    greedy,
    matched,
    optimal,
    overlap,
    parameter_score,
    read_calls,
    read_true_calls,
)

_THINK = Section("think")
_TOOL_CALL = Section("tool_call", own_lines=True)
_RESPONSE = Section("response")

#: The forms of an answer that ToolRL's prompt allows.
LAYOUTS = ((_THINK, _TOOL_CALL), (_THINK, _RESPONSE), (_THINK, _TOOL_CALL, _RESPONSE))

_TARGET_WORDS = 512
"""Words of a think section that earn the full length reward, as in ToolRL."""


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `compute_score`; in brackets the environment variable of ToolRL.

    - `matching`: `greedy`, as the reference code does: each true call in turn takes the best predicted call left;
      `optimal`, as the paper says: the assignment with the highest total (needs scipy).
    - `credit`: `partial`; `per_call` (INTERMEDIATEREWARD): a true call counts 1 if an equal one was predicted, else 0;
      `exact` (COARSEREWARD): the highest reward for equal lists of calls, the lowest for any other.
    - `correctness_max`: correctness is between its negative and itself: 3, or 1 (CORRECTMAX1).
    - `length`: `omitted`; `fixed` (WITHLENGTH): target 512 words.
    """

    matching: Literal["greedy", "optimal"] = "greedy"
    credit: Literal["partial", "per_call", "exact"] = "partial"
    correctness_max: float = limited(3.0, above=0.0)
    length: Literal["omitted", "fixed"] = "omitted"
    signed = ("correctness", "score")

    def __post_init__(self) -> None:
        if self.credit == "exact" and self.matching != "greedy":
            raise ConfigurationError(
                f"{KWARGS}.credit='exact' compares whole lists, so matching={self.matching!r} would have no effect; "
                "remove it"
            )
        if self.matching == "optimal":
            require_package("scipy", "scipy>=1.10", f"{KWARGS}.matching='optimal'")

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the rewards that `compute_score` returns besides `score`."""
        return ("format", "correctness") if self.length == "omitted" else ("format", "correctness", "length")

    @property
    def accuracies(self) -> tuple[str, ...]:
        """Names, `score` among them, whose values lie in [0, 1], as an accuracy's do."""
        return tuple(name for name in self.components if name not in self.signed)


@dataclass(frozen=True)
class Truth:
    """A parsed ground truth: the sections of the answer, and its calls if there are any."""

    sections: tuple[Section, ...]
    calls: tuple[Call, ...] | None


def check_kwargs(reward_kwargs: Mapping[str, object]) -> Options:
    """Parse the keyword arguments; raise `ConfigurationError` for an invalid one."""
    return parse_options(Options, reward_kwargs)


def check_ground_truth(ground_truth: object, row: str = "a row") -> Truth:
    """Parse the ground truth; raise `DataError`, which names the row, if it is invalid."""
    text = truth_text(row, ground_truth)
    wanted = [section for section in (_TOOL_CALL, _RESPONSE) if f"<{section.tag}>" in text]
    sections = (_THINK, *wanted)
    if not follows_layout(text, sections):
        raise bad_truth(row, "is not a well-formed answer itself", ground_truth, describe(sections))
    if _TOOL_CALL not in sections:
        return Truth(sections, None)
    try:
        return Truth(sections, tuple(read_true_calls(first_block(text, _TOOL_CALL.tag))))
    except UnreadableCallsError as error:
        expected = '{"name": "...", "parameters": {...}} on each line'
        raise bad_truth(row, f"cannot be read: {error}", ground_truth, expected) from error


def compute_score(
    data_source: object,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: object,
) -> dict[str, float]:
    r"""Return `format`, `correctness`, optionally `length`, and `score`, their sum.

    >>> truth = '<think> t </think>\n<tool_call>\n{"name": "f", "parameters": {"a": 1}}\n</tool_call>'
    >>> compute_score("rlla", truth, truth)
    {'format': 1.0, 'correctness': 3.0, 'score': 4.0}
    """
    options = check_kwargs(kwargs)
    truth = check_ground_truth(ground_truth, row_name(data_source, extra_info))
    answer = solution_str.strip()

    components = {"format": float(follows_layout(answer, truth.sections)), "correctness": 0.0}
    if truth.calls is not None:
        highest = options.correctness_max
        components["correctness"] = 2 * highest * agreement(options, list(truth.calls), answer) - highest
    if options.length != "omitted":
        components["length"] = think_length(answer)
    return {**components, "score": sum(components.values())}


def agreement(options: Options, true: list[Call], answer: str) -> float:
    """Share of the true calls that the answer makes, 0 to 1; 0 if its calls cannot be read."""
    if not has_both_tags(answer, _TOOL_CALL.tag):
        return 0.0
    try:
        return _agreement(options, true, read_calls(first_block(answer, _TOOL_CALL.tag)))
    except (UnreadableCallsError, RecursionError):
        return 0.0


def _agreement(options: Options, true: list[Call], predicted: list[Call]) -> float:
    if true == predicted:
        return 1.0
    if options.credit == "exact":
        return 0.0
    assign = optimal if options.matching == "optimal" else greedy
    if options.credit == "per_call":
        matches, full = matched(true, predicted, lambda call, other: float(call == other), assign), len(true)
    else:
        matches = matched(true, predicted, parameter_score, assign)
        full = sum(1 + len(call["parameters"]) for call in true)
    names = overlap([call["name"] for call in true], [call["name"] for call in predicted])
    return (names + matches) / (1 + full)


def think_length(answer: str) -> float:
    """Words of the last think section / 512, rounded to 2 places, at most 1; 0 without both tags."""
    if not has_both_tags(answer, _THINK.tag):
        return 0.0
    return min(1.0, round(len(last_block(answer, _THINK.tag).split()) / _TARGET_WORDS, 2))
