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
  five. `credit=exact` does not reward them; `names=ordered` does not for a single call with a single wrong value.
- A call inside the think section earns full correctness, but no format. No argument changes that. A condition of gdpo
  on `format` does not help: it would give such answers 0, which is more than the -3 of a wrong call.

Values are compared as in Python, so `1`, `1.0` and `true` are equal. Time is linear in the length of the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, Literal

from verl_ext.core.typed import limited
from verl_ext.errors import ConfigurationError, listed
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

# ToolRL's constants.
_TARGET_WORDS = 512
_FIRST_WORDS, _MORE_WORDS, _GROWTH_STEPS = 384, 256, 105
_FIRST_STAGE_STEPS = 30
_LINEAR_STEPS = 150


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `compute_score`; in brackets the environment variable of ToolRL.

    - `matching`: `greedy`, as the reference code does: each true call in turn takes the best predicted call left;
      `optimal`, as the paper says: the assignment with the highest total (needs scipy).
    - `credit`: `partial`; `per_call` (INTERMEDIATEREWARD): a true call counts 1 if an equal one was predicted, else 0;
      `exact` (COARSEREWARD): the highest reward for equal lists of calls, the lowest for any other.
    - `names`: `unordered`; `ordered` (REFINEDREWARD): lists of tool or parameter names overlap only if equal in order.
    - `correctness_max`: correctness is between its negative and itself: 3, or 1 (CORRECTMAX1).
    - `scale`: `constant`; `two_stage` (MAX1STEP30MAX3) or `linear` (SCHEDULEREWARD): see `score_ranges`.
    - `length`: `omitted`; `fixed` (WITHLENGTH): target 512 words; `growing` (SCHEDULELENGTH): 384 + 256 * step / 105.

    `two_stage`, `linear` and `growing` follow the training step, see `training_step`.
    """

    matching: Literal["greedy", "optimal"] = "greedy"
    credit: Literal["partial", "per_call", "exact"] = "partial"
    names: Literal["unordered", "ordered"] = "unordered"
    correctness_max: float = limited(3.0, above=0.0)
    scale: Literal["constant", "two_stage", "linear"] = "constant"
    length: Literal["omitted", "fixed", "growing"] = "omitted"

    def __post_init__(self) -> None:
        if self.scale != "constant" and self.correctness_max != 3.0:
            raise ConfigurationError(
                f"{KWARGS}.correctness_max={self.correctness_max} has no effect with scale={self.scale!r}, which sets "
                "the range itself; remove one of the two"
            )
        if self.credit == "exact" and (self.matching, self.names) != ("greedy", "unordered"):
            raise ConfigurationError(
                f"{KWARGS}.credit='exact' compares whole lists, so matching={self.matching!r} and names={self.names!r} "
                "would have no effect; remove them"
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
        beyond = ("correctness", "format") if self.scale == "linear" else ("correctness",)
        return tuple(name for name in self.components if name not in beyond)


@dataclass(frozen=True)
class Truth:
    """A parsed ground truth: the sections of the answer, and its calls if there are any."""

    sections: tuple[Section, ...]
    calls: tuple[Call, ...] | None


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
    options = parse_options(Options, kwargs)
    truth = check_ground_truth(ground_truth, row_name(data_source, extra_info))
    answer = solution_str.strip()

    step = training_step(options, extra_info)
    format_range, correctness_range = score_ranges(options, step)
    low, high = format_range
    components = {"format": high if follows_layout(answer, truth.sections) else low, "correctness": 0.0}
    if truth.calls is not None:
        low, high = correctness_range
        components["correctness"] = low + (high - low) * agreement(options, list(truth.calls), answer)
    if options.length != "omitted":
        growing = options.length == "growing"
        target = _FIRST_WORDS + _MORE_WORDS * step / _GROWTH_STEPS if growing else _TARGET_WORDS
        components["length"] = think_length(answer, target)
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
    ordered = options.names == "ordered"
    assign = optimal if options.matching == "optimal" else greedy
    if options.credit == "per_call":
        matches, full = matched(true, predicted, lambda call, other: float(call == other), assign), len(true)
    else:
        matches = matched(true, predicted, partial(parameter_score, ordered=ordered), assign)
        full = sum(1 + len(call["parameters"]) for call in true)
    names = overlap([call["name"] for call in true], [call["name"] for call in predicted], ordered=ordered)
    return (names + matches) / (1 + full)


def think_length(answer: str, target: float) -> float:
    """Words of the last think section / `target`, rounded to 2 places, at most 1; 0 without both tags."""
    if not has_both_tags(answer, _THINK.tag):
        return 0.0
    return min(1.0, round(len(last_block(answer, _THINK.tag).split()) / target, 2))


def score_ranges(options: Options, step: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """The lowest and highest format, and the lowest and highest correctness.

    As in ToolRL's code, `two_stage` is format 0 to 1 and correctness -1 to 1 before step 30, then 0 to 0.5 and -3 to 3;
    `linear`, with p = min(step / 150, 1), is format min(2p - 2, -1) to 2 - p and correctness -2 - p to 2 + p.
    """
    if options.scale == "two_stage":
        return ((0.0, 1.0), (-1.0, 1.0)) if step < _FIRST_STAGE_STEPS else ((0.0, 0.5), (-3.0, 3.0))
    if options.scale == "linear":
        done = min(step / _LINEAR_STEPS, 1.0)
        return (min(2 * done - 2, -1.0), 2 - done), (-2 - done, 2 + done)
    return (0.0, 1.0), (-options.correctness_max, options.correctness_max)


def training_step(options: Options, extra_info: Mapping[str, Any] | None) -> int:
    """The training step of the answer, from 1 as in ToolRL's code; 0 without a schedule.

    With each answer, the rollout reports the version of its weights, which is the number of finished steps. verl's
    `naive`, `remote` and `rate_limited` reward managers pass it on as `extra_info["max_global_steps"]`. So all reward
    workers agree, and a resumed run continues where it stopped. A counter of calls would do neither: verl spreads the
    samples over several workers at random, and mixes in those of validation.

    Validation differs from ToolRL by one step. After step 30 it is scored as step 31, and before training as step 1;
    ToolRL scores it as step 30 and step 0. A scorer cannot tell which answers are for validation.
    """
    if options.scale == "constant" and options.length != "growing":
        return 0
    step = (extra_info or {}).get("max_global_steps")
    if not isinstance(step, Integral) or step < 0:
        raise ConfigurationError(
            f"a schedule ({KWARGS}: scale={options.scale!r}, length={options.length!r}) needs the training step in "
            f"extra_info['max_global_steps'], found {step!r} (keys: {listed(extra_info or {})}); set "
            "reward.reward_manager.name=naive, or scale=constant and length=omitted or fixed"
        )
    return int(step) + 1
