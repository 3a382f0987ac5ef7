r"""Score ground truths as responses, in the templates that reward functions read: `42`, `#### 42`, `\boxed{42}`, ...

A response receives a reward if it scores higher than an empty response. If no template receives a reward, the function
is broken, or it reads another template.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from verl_ext.advantages.table import is_number
from verl_ext.checks.scoring import Scorer, ScoringError
from verl_ext.core.batch import LARGEST_REWARD

REASONING = "<think>\nFirst,\nthen.\n</think>\n"
TEMPLATES = (
    *("{}", "#### {}", r"\boxed{{}}", "<answer>{}</answer>", r"<answer>\boxed{{}}</answer>"),
    *(f"{REASONING}<answer>{{}}</answer>", f"{REASONING}<answer>\n{{}}\n</answer>", rf"{REASONING}\boxed{{{{}}}}"),
    *("Answer: {}", "The answer is {}", "```\n{}\n```", "```python\n{}\n```"),
)
"""Each is a response, in which `{}` stands for the ground truth."""
FIRST_ENTRY = "{first}"
"""In a template, this stands for the first entry of a ground truth that is a structure."""
EMPTY, OF_FILE, LONG = "an empty response", "the response of the file", "a long response"
"""Kinds of responses that are not made from a template."""
LONG_LENGTH = 200
"""The number of characters of the long response."""
SEARCHED_ROWS = 10
"""The maximum number of rows of a data source on which all templates are tried."""
Measure = Callable[[Mapping[str, Any]], Any]
"""Returns one number of a result, such as the value of a component."""


def templates_for(truth: Any, custom: Sequence[str] = ()) -> list[str]:
    """Return the templates for a ground truth; none if it is empty."""
    if truth in (None, "", [], {}):
        return []
    templates = list(dict.fromkeys([*TEMPLATES, *custom]))
    if not isinstance(_parsed(truth), dict | list):
        return templates
    return [*templates, *(template.replace("{}", FIRST_ENTRY) for template in templates)]


def fill_template(template: str, truth: Any) -> str:
    """Return a ground truth in a template.

    >>> fill_template("#### {}", 42), fill_template("<answer>{first}</answer>", {"target": ["Paris", "paris"]})
    ('#### 42', '<answer>Paris</answer>')
    """
    first = _parsed(truth)
    while isinstance(first, dict | list):
        entries = first.values() if isinstance(first, dict) else first
        # Parquet gives a structure the keys of all rows, so entries may be None.
        first = next((entry for entry in entries if entry is not None), "")
    if FIRST_ENTRY in template:
        return template.replace(FIRST_ENTRY, str(first))
    whole = truth if isinstance(truth, str) else json.dumps(truth, default=str)
    return template.replace("{}", whole)


def _parsed(truth: Any) -> Any:
    """Return the structure that a ground truth contains as JSON text; any other ground truth as it is."""
    if isinstance(truth, str) and truth.startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            return json.loads(truth)
    return truth


def number_of(value: Any) -> float | None:
    """Return a number that a reward function returned, or the sum of a list per turn or of a rubric.

    >>> number_of("[[1.0, 3.0], [0.5, -1.0]]")
    2.5
    """
    if isinstance(value, str):
        with suppress(TypeError, ValueError, LookupError, OverflowError, RecursionError):
            return _sum_of_list(json.loads(value))
    return float(value) if is_number(value) and abs(value) <= LARGEST_REWARD else None


def _sum_of_list(entries: Any) -> float | None:
    if not isinstance(entries, list):
        return None
    numbers = [entry[0] * entry[1] if isinstance(entry, list) else entry for entry in entries]
    return float(sum(numbers))


def shortened(text: str) -> str:
    """Return the beginning of a response, on one line."""
    dots = "..." if len(text) > 60 else ""
    return text[:60].replace("\n", "\\n") + dots


@dataclass(frozen=True)
class Response:
    """A response to a row of data."""

    place: str
    """The row, such as `row 3 of train.parquet`."""
    data_source: str
    is_training: bool
    """Whether the row is one of `data.train_files`."""
    kind: str
    """The template, or `EMPTY`, `OF_FILE` or `LONG`."""
    text: str

    @property
    def where(self) -> str:
        """The response, for messages."""
        kind = self.kind if self.kind in (EMPTY, OF_FILE, LONG) else "the ground truth as"
        return f"{self.place}, {kind}" + (f" `{shortened(self.text)}`" if self.text else "")


@dataclass
class ScoredRow:
    """The responses to a row of data that were made from its ground truth."""

    best: Response
    """The ground truth in the template with the highest reward, or in the first template if none is rewarded."""
    from_truth: list[Response]
    """The ground truth in each template that was scored."""


@dataclass
class Failure:
    """A mistake of the reward function, and the responses for which it occurred."""

    error: ScoringError
    where: list[str]


class RewardProbe:
    """Scores responses to rows, and finds out which receive a reward."""

    def __init__(
        self,
        scorer: Scorer,
        measures: Mapping[str, Measure],
        accuracy: Measure,
        custom_templates: Sequence[str] = (),
        *,
        is_expensive: bool = False,
    ) -> None:
        """`is_expensive`: whether only the first template and the custom ones are tried."""
        self.scorer = scorer
        self.measures = measures
        """The numbers that decide whether a response receives a reward, by name."""
        self.accuracy = accuracy
        """The number that says whether a response is correct."""
        self.custom_templates, self.is_expensive = custom_templates, is_expensive
        self.results: dict[Response, dict[str, Any]] = {}
        self.failures: dict[str, Failure] = {}
        """What the reward function raised, by cause."""
        self.rows: dict[str, list[ScoredRow]] = {}
        """The rows of each data source that have a ground truth."""
        self.best_template: dict[str, Response | None] = {}
        """For each data source the first response with the highest reward; None if no response receives a reward."""
        self._searched_rows: Counter[str] = Counter()
        self.tried_rows: dict[str, Mapping[str, Any]] = {}
        """The rows of data on which the function was called, by their places."""

    def score_row(self, place: str, row: Mapping[str, Any], given: Iterable[str], *, is_training: bool) -> None:
        """Score responses to a row: an empty one, those of the user, and its ground truth in one or all templates."""
        source = str(row.get("data_source"))
        truth = (row["reward_model"] or {}).get("ground_truth")
        self.tried_rows[place] = row
        empty = Response(place, source, is_training, EMPTY, "")
        others = [replace(empty, kind=OF_FILE, text=text) for text in given]
        templates = self._ordered_templates(source, truth)
        from_truth = [replace(empty, kind=item, text=fill_template(item, truth)) for item in templates]
        if not self._score_all([*from_truth[:1], empty, *others]) or not from_truth:
            return
        scored = from_truth[:1]
        if self._needs_search(source, from_truth[0]):
            self._searched_rows[source] += 1
            if not self._score_all(from_truth[1:]):
                return
            scored = from_truth
        best = self._best(scored)
        self.rows.setdefault(source, []).append(ScoredRow(best or from_truth[0], scored))
        if self.best_template.get(source) is None:
            self.best_template[source] = best or self._best(others)
            if best is not None and isinstance(truth, str) and not self.is_expensive:
                self._score_long_response(best, truth)

    def _ordered_templates(self, source: str, truth: Any) -> list[str]:
        """Return the templates for a ground truth. The best one of the data source comes first, if it is known."""
        templates = templates_for(truth, self.custom_templates)
        if self.is_expensive:
            templates = [template for template in templates if template in (TEMPLATES[0], *self.custom_templates)]
        best = self.best_template.get(source)
        if best is not None and best.kind in templates:
            templates.remove(best.kind)
            templates.insert(0, best.kind)
        return templates

    def _needs_search(self, source: str, first: Response) -> bool:
        """Return whether the other templates are tried on a row, too: the first one does not receive all it can."""
        if self._searched_rows[source] >= SEARCHED_ROWS:
            return False
        best = self.best_template.get(source)
        if best is None or not self.gains(first):
            return True
        source_can_be_correct = self.gain(best, self.accuracy) > 0
        row_is_correct = self.gain(first, self.accuracy) > 0
        return source_can_be_correct and not row_is_correct

    def _score_long_response(self, response: Response, truth: str) -> None:
        """Score a long response, on which a regular expression may try every way to divide it."""
        long_truth = (truth * LONG_LENGTH)[:LONG_LENGTH] + " ?"
        self._score(replace(response, kind=LONG, text=fill_template(response.kind, long_truth)))

    def _score_all(self, responses: Sequence[Response]) -> bool:
        """Score responses up to the first one that fails; return whether none has failed."""
        return all(self._score(response) for response in responses)

    def _score(self, response: Response) -> bool:
        """Score a response; return whether the function has returned a result."""
        try:
            row = self.tried_rows[response.place]
            self.results[response] = self.scorer.score(row, response.text, response.where)
        except ScoringError as error:
            failure = self.failures.setdefault(error.cause, Failure(error, []))
            failure.where.append(response.where)
            return False
        return True

    def differences_when_repeated(self) -> dict[str, tuple[Any, Any]]:
        """Score the first response once more; return each number that differs, before and after."""
        if not self.results:
            return {}
        first = next(iter(self.results))
        before = self.values(first)
        self._score(first)
        after = self.values(first)
        return {name: (before[name], after[name]) for name in before if repr(before[name]) != repr(after[name])}

    def values(self, response: Response) -> dict[str, Any]:
        """Return the numbers of a response by name."""
        result = self.results.get(response, {})
        return {name: measure(result) for name, measure in self.measures.items()}

    def gain(self, response: Response, measure: Measure) -> float:
        """Return by how much a response scores higher than the empty response to the same row; at least 0."""
        empty = replace(response, kind=EMPTY, text="")
        value = number_of(measure(self.results.get(response, {})))
        value_of_empty = number_of(measure(self.results.get(empty, {})))
        if value is None:
            return 0.0
        return max(0.0, value - (value_of_empty or 0.0))  # an empty response may not be scored

    def gains(self, response: Response) -> dict[str, float]:
        """Return the gains of a response by name, without those that are 0."""
        gains = {name: self.gain(response, measure) for name, measure in self.measures.items()}
        return {name: gain for name, gain in gains.items() if gain > 0}

    def _best(self, responses: Sequence[Response]) -> Response | None:
        """Return the response that is rewarded by most numbers, then by the highest sum; None if none is rewarded."""
        best, best_rank = None, (0, 0.0)
        for response in responses:
            gains = self.gains(response)
            rank = (len(gains), sum(gains.values()))
            if rank > best_rank:
                best, best_rank = response, rank
        return best
