r"""Accuracy of the final answer in \boxed{...}, verified by math-verify.

`accuracy` is 1 if the last complete \boxed{...} of the response equals the ground truth, else 0. `score` has the same
value. The ground truth is the final answer alone, or a solution that contains a box. `\fbox{5}` is a box as well, and
so is `\boxed 5`: one number or one letter without braces, at the end of a formula, a line or a phrase. Any other box
without braces, such as `\boxed 5x+3` or `\boxed \frac12`, is not read. math-verify decides what is equal: `\frac{1}{2}`
equals `0.5`, and `x=5` equals `5`. An answer that math-verify cannot read, such as `0.\overline{72}`, equals only the
same text.

math-verify stops endless computations (`\boxed{9^{9^{9^9}}}`) with a signal, which Python allows only in the main
thread. verl calls reward functions in worker threads, where one such computation would also stop all other threads. So
each process that calls the reward function starts a child process for math-verify (see `math_judge`). An answer counts
as incorrect if it takes more than `timeout` seconds of CPU time to verify, or if it is longer than 2,000 characters. A
ground truth may take ten times as long, because it is read only once. A ground truth that takes longer, is empty or has
unbalanced braces raises `DataError`.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from verl_ext.core.schema import bounded
from verl_ext.rewards.math_judge import VERIFIER, NoVerdictError
from verl_ext.rewards.options import ExtraInfo, bad_truth, parse_options, require_package, row_name, truth_text

MAX_CHARACTERS = 2000
"""The length of the longest answer that is verified."""
GROUND_TRUTH_TIMEOUT_FACTOR = 10
"""A ground truth may take this multiple of `timeout`."""

_BARE = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?<=\d)|[A-Za-z]"
_SPACE = r"(?:[ \t]|\\[,;: ]|\\q?quad\b)*"
_END = (
    _SPACE + r"(?:\Z|[\n\r$}]|\\[)\]\\]|\\end\b|</[a-z]|\*\*(?!\s*[-+\d(\\]|\w)"
    r"|(?:[.!?]|[,;:](?!\s*[-+\d(\\]))(?:[\s$]|\\[)\]]|\Z))"
)
# A box opens with a brace, or is bare (MATH has both). Escaped characters are tokens of their own, so that \{ does not
# count as a brace.
_BOX = r"\\(?:boxed|fbox)(?![A-Za-z])"
_TOKEN = re.compile(rf"{_BOX}\s*(?:(?P<brace>\{{)|(?P<bare>{_BARE})(?={_END}))|\\.|[{{}}]", re.DOTALL)


@dataclass(frozen=True)
class Options:
    """The keyword arguments of `compute_score`. `timeout`: limit of CPU time in seconds for verifying one answer."""

    timeout: float = bounded(0.5, above=0.0, high=3600.0)
    components, accuracies = ("accuracy",), ("accuracy", "score")

    def __post_init__(self) -> None:
        require_package("math_verify", "math-verify>=0.8,<0.9", "verl_ext.rewards.boxed_math")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the complete \boxed{...} that opens last, or None without a complete box.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}, or \boxed{3")
    '\\frac{1}{2}'
    >>> last_boxed(r"The sum is $\boxed 12$.")
    '12'
    >>> last_boxed(r"\boxed 5x+3")
    """
    open_at: list[int | None] = []  # for each open brace, where its box begins; None for a plain brace
    start, end = -1, -1
    for token in _TOKEN.finditer(text):
        if token[0] == "}":
            began = open_at.pop() if open_at else None
            if began is not None and began > start:
                start, end = began, token.start()
        elif token[0] == "{":
            open_at.append(None)
        elif token["brace"]:
            open_at.append(token.end())
        elif token["bare"]:
            start, end = token.span("bare")
    return None if start < 0 else text[start:end].strip()


def check_ground_truth(ground_truth: object, row: str = "a row", timeout: float = Options.timeout) -> str:
    """Return the gold answer, or raise `DataError`, which names the row, if the ground truth has none."""
    text = truth_text(row, ground_truth)
    boxed = last_boxed(text)
    if boxed is None and re.search(_BOX, text):
        raise bad_truth(row, "has a box that cannot be read", ground_truth, r"\boxed{...}")
    gold = text if boxed is None else boxed
    try:
        problem = _why_unreadable(gold, GROUND_TRUTH_TIMEOUT_FACTOR * timeout)
    except NoVerdictError as error:  # not cached: the next sample asks again
        problem = f"cannot be read, because {error}"
    if problem:
        raise bad_truth(row, problem, ground_truth, "an answer in LaTeX")
    return gold


@lru_cache(maxsize=65536)  # the samples of a group share their ground truth, and epochs repeat it
def _why_unreadable(gold: str, timeout: float) -> str | None:
    if last_boxed(rf"\boxed{{{gold}}}") != gold:
        return "has unbalanced braces"
    return None if VERIFIER.ask(gold, gold, timeout) else "cannot be read by math-verify"


def compute_score(
    data_source: object, solution_str: str, ground_truth: object, extra_info: ExtraInfo = None, **kwargs: object
) -> dict[str, float]:
    r"""Return `accuracy`, and the same value as `score`."""
    options = parse_options(Options, kwargs)
    gold = check_ground_truth(ground_truth, row_name(data_source, extra_info), options.timeout)
    boxed = last_boxed(solution_str)
    judged = boxed is not None and 0 < len(boxed) <= MAX_CHARACTERS
    accuracy = float(judged and VERIFIER.equal(gold, str(boxed), options.timeout))
    return {"accuracy": accuracy, "score": accuracy}
