r"""Score ground truths as responses, in the templates that reward functions read: `42`, `#### 42`, `\boxed{42}`, ...

A response receives a reward if it scores higher than an empty response. If no template receives a reward, the function
is broken, or it reads another template. `RewardProbe` describes in which order responses are scored.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from verl_ext.advantages.table import is_number
from verl_ext.checks.scorer_process import ScoringError
from verl_ext.checks.scoring import Scorer
from verl_ext.core.batch import LARGEST_REWARD

REASONING = "<think>\nFirst,\nthen.\n</think>\n"
TEMPLATES = (
    "{}",
    "#### {}",
    r"\boxed{{}}",
    "<answer>{}</answer>",
    r"<answer>\boxed{{}}</answer>",
    REASONING + "<answer>{}</answer>",
    REASONING + "<answer>\n{}\n</answer>",
    REASONING + r"\boxed{{}}",
    "Answer: {}",
    "The answer is {}",
    "```\n{}\n```",
    "```python\n{}\n```",
)
"""Each is a response, in which `{}` stands for the ground truth. The other braces are a part of the response."""
FIRST_ENTRY = "{first}"
"""In a template, this stands for the first entry of a ground truth that is a structure."""
EMPTY, FROM_FILE, LONG = "an empty response", "the response of the file", "a long response"
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

    A rubric is the text of a list of pairs, the score and the weight of each criterion. Other texts have no number.

    >>> number_of("[[1.0, 3.0], [0.5, -1.0]]")
    2.5
    """
    if isinstance(value, str):
        with suppress(TypeError, ValueError, LookupError, OverflowError, RecursionError):
            return _sum_of_list(json.loads(value))
        return None
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
    """The template, or `EMPTY`, `FROM_FILE` or `LONG`."""
    text: str

    @property
    def where(self) -> str:
        """The response, for messages."""
        kind = self.kind if self.kind in (EMPTY, FROM_FILE, LONG) else "the ground truth as"
        return f"{self.place}, {kind}" + (f" `{shortened(self.text)}`" if self.text else "")


@dataclass
class ScoredRow:
    """The responses to a row of data that were made from its ground truth."""

    from_truth: list[Response]
    """The ground truth in each template that was scored."""
    best: Response
    """The one with the highest reward, or the first one if none is rewarded."""

    def in_template(self, template: str) -> Response | None:
        """Return the ground truth in a template, or None if it was not scored there."""
        return next((response for response in self.from_truth if response.kind == template), None)


class RewardProbe:
    """Scores responses to rows, and finds the template that the reward function reads in each data source.

    `score_row` scores these responses to a row, in this order. If one of the first four cannot be scored, the row ends
    there and is not a part of `rows`.

    1. The ground truth in one template: the best one of the data source so far, else the first of `TEMPLATES`.
    2. An empty response. A response is rewarded if one of the measures is higher than for the empty response.
    3. The user's response to this row, from the file of `--responses`.
    4. The ground truth in all other templates, if the first one does not receive all that it can (`_needs_search`). All
       templates are tried on at most `SEARCHED_ROWS` rows of a data source.
    5. If this row is rewarded more, in another template, than the best template so far, this template is the best one
       from now on, and a long response is scored in it. Then each row of the data source that lacks a response in the
       best template gets one.

    A row without a ground truth has only the second and the third response. If the function is expensive, only the
    first of `TEMPLATES` and the custom ones are tried, and no long response.
    """

    def __init__(
        self,
        scorer: Scorer,
        measures: Mapping[str, Measure],
        accuracy: Measure,
        custom_templates: Sequence[str] = (),
        *,
        is_expensive: bool = False,
    ) -> None:
        """`is_expensive`: whether a call may take long, so that few templates are tried."""
        self.scorer = scorer
        self.measures = measures
        """The numbers that decide whether a response receives a reward, by name."""
        self.accuracy = accuracy
        """The number that says whether a response is correct."""
        self.custom_templates, self.is_expensive = custom_templates, is_expensive
        self.tried_rows: dict[str, Mapping[str, Any]] = {}
        """The rows of data on which the function was called, by their places."""
        self.results: dict[Response, dict[str, Any]] = {}
        """What the function returned for each response that it scored."""
        self.failures: dict[str, ScoringError] = {}
        """What the function raised, by cause, with the responses."""
        self.failed: set[Response] = set()
        """The responses that could not be scored."""
        self.rows: dict[str, list[ScoredRow]] = {}
        """The rows of each data source that have a ground truth."""
        self.best_template: dict[str, Response] = {}
        """For each data source the ground truth with the highest reward, whose `kind` is the best template.

        A data source is missing if no ground truth in any template is rewarded. Of equal rewards the first one counts.
        """
        self.rewarded_by_file: set[str] = set()
        """The data sources in which a response of the user's file is rewarded."""
        self._searched_rows: Counter[str] = Counter()

    def score_row(self, place: str, row: Mapping[str, Any], user_texts: Sequence[str], *, is_training: bool) -> None:
        """Score responses to a row, in the order that the class describes. `user_texts` are those of the user."""
        source = str(row.get("data_source"))
        truth = (row["reward_model"] or {}).get("ground_truth")
        self.tried_rows[place] = row
        empty = Response(place, source, is_training, EMPTY, "")
        user_responses = [replace(empty, kind=FROM_FILE, text=text) for text in user_texts]
        templates = self._ordered_templates(source, truth)
        from_truth = [replace(empty, kind=template, text=fill_template(template, truth)) for template in templates]
        if not self._score_all([*from_truth[:1], empty, *user_responses]):
            return
        if not from_truth:
            return
        scored = from_truth[:1]
        if self._needs_search(source, from_truth[0]):
            self._searched_rows[source] += 1
            if not self._score_all(from_truth[1:]):
                return
            scored = from_truth
        if self._best(user_responses) is not None:
            self.rewarded_by_file.add(source)
        best = self._best(scored)
        self.rows.setdefault(source, []).append(ScoredRow(scored, best or from_truth[0]))
        if best is not None:
            self._remember_template(best, truth)
        self._complete_rows(source)

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

    def _remember_template(self, response: Response, truth: Any) -> None:
        """Make the template of a rewarded response the best one of its data source, if it is."""
        best = self.best_template.get(response.data_source)
        if best is not None and (best.kind == response.kind or self._rank(response) <= self._rank(best)):
            return
        self.best_template[response.data_source] = response
        if isinstance(truth, str) and not self.is_expensive:
            self._score_long_response(response, truth)

    def _score_long_response(self, response: Response, truth: str) -> None:
        """Score a long response, on which a regular expression may try every way to divide it."""
        long_truth = (truth * LONG_LENGTH)[:LONG_LENGTH] + " ?"
        self._score(replace(response, kind=LONG, text=fill_template(response.kind, long_truth)))

    def _complete_rows(self, source: str) -> None:
        """Score the ground truths of a data source in its best template, if they were scored only in others.

        These are the earlier rows if a later row has found the template. If the template takes the first entry of a
        structure, a ground truth that is no structure is scored here, too.
        """
        best = self.best_template.get(source)
        if best is None:
            return
        for row in self.rows[source]:
            truth = self.tried_rows[row.best.place]["reward_model"]["ground_truth"]
            response = replace(row.best, kind=best.kind, text=fill_template(best.kind, truth))
            is_known = row.in_template(best.kind) is not None or response in self.failed
            if not is_known and self._score(response):
                row.from_truth.append(response)
                row.best = self._best(row.from_truth) or row.best

    def _score_all(self, responses: Sequence[Response]) -> bool:
        """Score responses up to the first one that fails; return whether none has failed."""
        return all(self._score(response) for response in responses)

    def _score(self, response: Response) -> bool:
        """Score a response; return whether the function has returned a result."""
        result = self._result_of(response)
        if result is not None:
            self.results[response] = result
        return result is not None

    def _result_of(self, response: Response) -> dict[str, Any] | None:
        """Call the reward function; return its result, or None if it has failed."""
        try:
            return self.scorer.score(self.tried_rows[response.place], response.text, response.where)
        except ScoringError as error:
            self.failures.setdefault(error.cause, error).where.append(response.where)
            self.failed.add(response)
            return None

    def differences_when_repeated(self) -> dict[str, tuple[Any, Any]]:
        """Score the first response once more; return each number that differs, before and after."""
        if not self.results:
            return {}
        first, result = next(iter(self.results.items()))
        repeated_result = self._result_of(first)
        if repeated_result is None:
            return {}
        before, after = self._measured(result), self._measured(repeated_result)
        return {name: (before[name], after[name]) for name in before if repr(before[name]) != repr(after[name])}

    def values(self, response: Response) -> dict[str, Any]:
        """Return the numbers of a response by name."""
        return self._measured(self.results.get(response, {}))

    def _measured(self, result: Mapping[str, Any]) -> dict[str, Any]:
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

    def _rank(self, response: Response) -> tuple[int, float]:
        """Return by how many numbers a response is rewarded, and the sum of their gains. A higher rank is better."""
        gains = self.gains(response)
        return len(gains), sum(gains.values())

    def _best(self, responses: Sequence[Response]) -> Response | None:
        """Return the first response of the highest rank; None if no response is rewarded."""
        rewarded = [response for response in responses if self.gains(response)]
        return max(rewarded, key=self._rank, default=None)
