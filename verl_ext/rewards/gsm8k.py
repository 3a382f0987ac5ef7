r"""Three rewards of 0 or 1 for grade-school arithmetic, as in GDPO's GSM8K experiment.

The expected response is `<think>...</think>\n<answer>18</answer>`. Let x be the stripped text after the last `<answer>`
up to `</answer>` (without tags, the whole response), and gold the text after `####`. The components are:

- `correctness`: x is the gold number.
- `integer`: x is written as an integer.
- `format`: the stripped response consists of the two sections and nothing else.

`strict` selects how numbers are read:

- `corrected`, the default: `1,000`, `+1000` and `1000.0` are the number 1000, and `-5` and `1,000` are integers.
- `reference`: as in NVIDIA's code, `x == gold` and `x.isdigit()`. So with a gold of `1,000` or `-5` (98 of GSM8K's
  8,792 rows) no answer is both correct and an integer, `18.0` is incorrect for 18, and superscript digits are an
  integer. The response is not stripped for `format`: surrounding whitespace costs the reward, except for one line break
  at the end.
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from verl_ext.rewards.options import ExtraInfo, bad_truth, parse_options, row_name, truth_text
from verl_ext.rewards.tags import Section, follows_layout, last_block

_LAYOUT = (Section("think"), Section("answer"))

# Digits, or groups of three with commas. Each character can match in one way only, so there is no backtracking.
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?")


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `compute_score`."""

    strict: Literal["corrected", "reference"] = "corrected"
    components = accuracies = ("correctness", "integer", "format")


def read_number(text: str) -> Decimal | None:
    """Parse a number, or return None if `text` is not a number.

    `int` would take quadratic time and reject 4,301 digits.

    >>> read_number("-1,050.50") == Decimal("-1050.5")
    True
    """
    return Decimal(text.replace(",", "")) if _NUMBER.fullmatch(text) else None


def check_ground_truth(ground_truth: object, row: str = "a row", strict: str = "corrected") -> str:
    """Return the text after `####`, or the whole text without that mark. Raise `DataError` if it is invalid."""
    text = truth_text(row, ground_truth)
    gold = text.partition("####")[2].strip() if "####" in text else text
    is_integer = read_number(gold) is not None and "." not in gold
    if not gold or (strict == "corrected" and not is_integer):
        raise bad_truth(row, f"has the answer {gold!r}", ground_truth, "an integer such as '-1,000', after '####'")
    return gold


def compute_score(
    data_source: object, solution_str: str, ground_truth: object, extra_info: ExtraInfo = None, **kwargs: object
) -> dict[str, float]:
    r"""Return `correctness`, `integer`, `format`, and `score`, their sum.

    >>> compute_score("gsm8k", "<think>9 * 2</think>\n<answer>18</answer>", "#### 18")
    {'correctness': 1.0, 'integer': 1.0, 'format': 1.0, 'score': 3.0}
    """
    options = parse_options(Options, kwargs)
    gold = check_ground_truth(ground_truth, row_name(data_source, extra_info), options.strict)
    answer = last_block(solution_str, "answer").strip()
    if options.strict == "reference":
        correct, integer = answer == gold, answer.isdigit()
    else:
        number = read_number(answer)
        correct = number is not None and number == read_number(gold)
        integer = number is not None and "." not in answer
    # NVIDIA's code ends its regular expression with `$`, which also matches before a final line break.
    whole = solution_str.removesuffix("\n") if options.strict == "reference" else solution_str.strip()
    layout = follows_layout(whole, _LAYOUT)
    components = {"correctness": float(correct), "integer": float(integer), "format": float(layout)}
    return {**components, "score": sum(components.values())}
