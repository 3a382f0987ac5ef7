r"""Score ground truths as responses, in the formats that reward functions read: `42`, `#### 42`, `\boxed{42}`, ...

A response receives a reward if it scores higher than an empty response. If no format receives a reward, the function is
broken, or it reads another format.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from verl_ext.advantages.table import is_number
from verl_ext.checks.scoring import EndedError, Scorer
from verl_ext.core.batch import LARGEST_REWARD
from verl_ext.errors import DataError, Finding

THOUGHT = "<think>\nFirst,\nthen.\n</think>\n"
FORMS = (
    *("{}", "#### {}", r"\boxed{{}}", "<answer>{}</answer>", r"<answer>\boxed{{}}</answer>"),
    *(f"{THOUGHT}<answer>{{}}</answer>", f"{THOUGHT}<answer>\n{{}}\n</answer>", rf"{THOUGHT}\boxed{{{{}}}}"),
    *("Answer: {}", "The answer is {}", "```\n{}\n```", "```python\n{}\n```"),
)
"""Each is an answer, with the ground truth in the place of `{}`."""
FIRST_ENTRY = "{first}"
"""In a form the place of the first entry of a ground truth that is a structure."""
EMPTY, GIVEN, LONG = "an empty response", "the response of the file", "a long response"
NO_TRUTHS = (EMPTY, GIVEN, LONG)
MOST = 10
"""The maximum number of rows of a data source on which all templates are tried."""


def forms_of(truth: Any, more: Sequence[str] = ()) -> list[str]:
    """The forms for a ground truth; none if it is empty."""
    if truth in (None, "", [], {}):
        return []
    forms = list(dict.fromkeys([*FORMS, *more]))
    return forms if isinstance(truth, str) else [*forms, *(form.replace("{}", FIRST_ENTRY) for form in forms)]


def written(form: str, truth: Any) -> str:
    """A ground truth in a form.

    >>> written("#### {}", 42), written("<answer>{first}</answer>", {"target": ["Paris", "paris"]})
    ('#### 42', '<answer>Paris</answer>')
    """
    first = truth
    while isinstance(first, dict | list):  # parquet gives a structure the keys of all rows
        entries = first.values() if isinstance(first, dict) else first
        first = next((entry for entry in entries if entry is not None), "")
    whole = truth if isinstance(truth, str) else json.dumps(truth, default=str)
    return form.replace(FIRST_ENTRY, str(first)).replace("{}", whole)


def number_of(value: Any) -> float | None:
    """A number that a reward function returned; of a list by turn or by item its sum.

    >>> number_of("[[1.0, 3.0], [0.5, -1.0]]")
    2.5
    """
    with suppress(TypeError, ValueError, LookupError, OverflowError, RecursionError):
        entries = json.loads(value) if isinstance(value, str) else None
        if isinstance(entries, list):
            return float(sum(entry[0] * entry[1] if isinstance(entry, list) else entry for entry in entries))
    return float(value) if is_number(value) and abs(value) <= LARGEST_REWARD else None


@dataclass(frozen=True)
class Answer:
    """An answer to a row of data."""

    place: str
    """The row."""
    source: str
    """The row's data source."""
    training: bool
    kind: str
    """The form of a ground truth, or one of `NO_TRUTHS`."""
    text: str

    @property
    def where(self) -> str:
        """For messages."""
        kind = self.kind if self.kind in NO_TRUTHS else "the ground truth as"
        return f"{self.place}, {kind}" + (f" `{shown(self.text)}`" if self.text else "")


def shown(text: str) -> str:
    """An answer's beginning, on one line."""
    return text[:60].replace("\n", "\\n") + "..." * (len(text) > 60)


Number = Callable[[Mapping[str, Any]], Any]
"""Returns one of the numbers of a result."""


class Trial:
    """The responses that have been scored, and their rewards."""

    def __init__(self, scorer: Scorer, numbers: Mapping[str, Number], more: Sequence[str], *, costly: bool) -> None:
        """`numbers`: those that matter. `more`: forms of the user's. `costly`: only these and the first form."""
        self.scorer, self.numbers, self.more, self.costly = scorer, numbers, more, costly
        self.results: dict[Answer, dict[str, Any]] = {}
        self.problems: list[str] = []
        self.chosen: dict[str, Answer | None] = {}
        """By data source, the first response with the highest reward; None if no response receives a reward."""
        self.rows: dict[str, list[Answer]] = {}
        """By data source, the ground truth of each row in the template with the highest reward."""
        self._searched: Counter[str] = Counter()
        self._first: tuple[Answer, Mapping[str, Any]] | None = None

    def row(self, place: str, row: Mapping[str, Any], given: Sequence[str], *, training: bool) -> None:
        """Score answers to a row: its ground truth in the source's form, or in all, an empty one, and those given."""
        source, truth = str(row.get("data_source")), (row["reward_model"] or {}).get("ground_truth")
        known, forms = self.chosen.get(source), forms_of(truth, self.more)
        if self.costly:
            forms = [form for form in forms if form in (FORMS[0], *self.more)]
        forms.sort(key=lambda form: known is not None and form != known.kind)
        empty = Answer(place, source, training, EMPTY, "")
        truths = [replace(empty, kind=form, text=written(form, truth)) for form in forms]
        others = [replace(empty, kind=GIVEN, text=text) for text in given]
        if not all(self._score(row, answer) for answer in (*truths[:1], empty, *others)) or not truths:
            return
        searched = known is None or not self._gains(truths[0])
        if searched and self._searched[source] < MOST:
            self._searched[source] += 1
            if not all(self._score(row, answer) for answer in truths[1:]):
                return
        found = self._best(truths)
        self.rows.setdefault(source, []).append(found or truths[0])
        if known is None:
            self.chosen[source] = found = found or self._best(others)
            if found is not None and found.kind != GIVEN and isinstance(truth, str) and not self.costly:
                # On which a regular expression may try every way to divide it.
                self._score(row, replace(found, kind=LONG, text=written(found.kind, (truth * 200)[:200] + " ?")))

    def again(self) -> Iterator[Finding]:
        """Score the first response once more, and yield a note about what differs."""
        if self._first is None:
            return
        answer, row = self._first
        before = {name: self._of(answer, name) for name in self.numbers}
        self._score(row, answer)
        after = {name: self._of(answer, name) for name in self.numbers}
        differ = [name for name in before if repr(before[name]) != repr(after[name])]
        if differ:
            values = ", ".join(f"{name}={before[name]} and {name}={after[name]}" for name in differ)
            yield Finding(
                "note",
                f"The reward function is not deterministic. Scored twice, {answer.where}, received {values}. A resumed "
                "run will not repeat the same numbers.",
                "Remove randomness and state from the reward function, if that was not intended.",
            )

    def _score(self, row: Mapping[str, Any], answer: Answer) -> bool:
        try:
            self.results[answer] = self.scorer.score(row, answer.text, answer.where)
            self._first = self._first or (answer, row)
        except EndedError:
            raise
        except DataError as error:
            self.problems.append(f"{answer.where}: {error}")
            return False
        return True

    def _of(self, answer: Answer, name: str) -> Any:
        return self.numbers[name](self.results.get(answer, {}))

    def _gains(self, answer: Answer) -> dict[str, float]:
        """Return by name by how much a response scores higher than the empty response to the same row."""
        empty, found = replace(answer, kind=EMPTY, text=""), {}
        for name in self.numbers:
            value, nothing = (number_of(self._of(one, name)) for one in (answer, empty))
            if value is not None and nothing is not None and value > nothing:
                found[name] = value - nothing
        return found

    def _best(self, answers: Sequence[Answer]) -> Answer | None:
        """Return the response that is rewarded by most numbers, then by the highest sum; None if none is rewarded."""
        gains = {answer: self._gains(answer) for answer in answers}
        best = max(gains, key=lambda answer: (len(gains[answer]), sum(gains[answer].values())), default=None)
        return best if best is not None and gains[best] else None

    def summary(self) -> Iterator[tuple[str, bool]]:
        """Yield a sentence for each data source, and whether it needs a review."""
        for source, answer in self.chosen.items():
            rows = self.rows[source]
            title = "Ground truths" + (f" of data_source {source}" if len(self.chosen) > 1 else "")
            if answer is None:
                yield f"{title} receive no more reward than an empty response: {self._without_reward(rows)}.", True
            elif answer.kind != GIVEN:
                gains = {row: self._gains(row) for row in rows}
                best = self._gains(answer)
                lower = [
                    row
                    for row, gain in gains.items()
                    if any(2 * gain.get(name, 0) < most for name, most in best.items())
                ]
                text = f"{title} formatted as `{shown(answer.text)}` receive {self._rewards(answer)}"
                text += f" in {len(rows) - len(lower):,} of {len(rows):,} rows."
                for row in lower[:3]:
                    text += f" The ground truth `{shown(row.text)}` of {row.place} receives {self._rewards(row)}."
                yield text, not all(gains.values())

    def _without_reward(self, rows: Sequence[Answer]) -> str:
        """Return the rewards of the first row of a data source, and the templates that were tried on it."""
        first = rows[0]
        tried = {answer.kind for answer in self.results if answer.place == first.place} - {*NO_TRUTHS}
        named = [f"`{template}`" for template in (*FORMS[:3], *self.more) if template in tried]
        others = len(tried) - len(named)
        templates = ", ".join(named) + (f" and {others} other templates" if others else "")
        return f"`{shown(first.text)}` receives {self._rewards(first)}, and so do the templates {templates}"

    def _rewards(self, answer: Answer) -> str:
        return ", ".join(f"{name}={self._of(answer, name)}" for name in self.numbers)

    def constant(self) -> list[str]:
        """Each of the numbers that is the same for every answer, with its value."""
        columns = {name: {str(self._of(answer, name)) for answer in self.results} for name in self.numbers}
        return [f"{name}={values.pop()}" for name, values in columns.items() if len(values) == 1]
