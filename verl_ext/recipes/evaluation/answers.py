"""Read the answers that verl dumps in validation: one JSON object per answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext import jsonl
from verl_ext.errors import DataError, listed

NOT_REWARDS = {"input", "output", "gts", "step", "uid"}


@dataclass(frozen=True)
class Answer:
    """One answer: the prompt it belongs to, and its rewards."""

    prompt: str
    rewards: Mapping[str, float]


def find_dump(place: Path, step: int | None = None) -> Path:
    """The dump of a step in a folder, by default of the last step. A path to a file is returned as it is."""
    if place.is_file():
        return place
    dumps = {int(path.stem): path for path in place.glob("*.jsonl") if path.stem.isdigit()}
    chosen = max(dumps, default=None) if step is None else step
    if chosen not in dumps:
        raise DataError(
            f"{place} holds no dump{'' if step is None else f' of step {step}'}; found steps {listed(dumps)}; verl "
            "writes them to trainer.validation_data_dir, as <step>.jsonl"
        )
    return dumps[chosen]


def read_answers(path: Path) -> tuple[list[Answer], int]:
    """All answers of a dump, and the number of incomplete lines. Of an answer in several parts the last counts."""
    last: dict[tuple[str, str], tuple[int, Answer]] = {}
    torn = 0
    for number, line in jsonl.lines(path):
        try:
            record = jsonl.parse(line)
        except DataError:
            torn += 1
            continue
        if not isinstance(record, dict) or "output" not in record:
            raise DataError(f"{path}, line {number} is not an answer of verl's validation: it has no 'output'")
        prompt, session, part = _place(record, number)
        kept = last.get((prompt, session))
        if kept is None or part > kept[0]:
            last[prompt, session] = part, Answer(prompt, _rewards(record))
    answers = [answer for _, answer in last.values()]
    if not answers:
        raise DataError(f"{path} has {torn} unreadable line(s) and no others" if torn else f"{path} is empty")
    for answer in answers:
        if set(answer.rewards) != set(answers[0].rewards):
            raise DataError(
                f"{path}: answers have different rewards: {listed(answers[0].rewards)} and {listed(answer.rewards)}"
            )
    return answers, torn


def split_key(uid: object) -> tuple[str, int, int] | None:
    """Prompt, session and part. The default trainer writes its key, `{prompt}_{session}_{part}`, as `uid`.

    >>> split_key("3f2a_1_0"), split_key("3f2a")
    (('3f2a', 1, 0), None)
    """
    prompt, _, session = str(uid).rpartition("_")[0].rpartition("_")
    part = str(uid).rpartition("_")[2]
    numbers = session.isdecimal() and part.isdecimal() and len(session) < 10 and len(part) < 10
    return (prompt, int(session), int(part)) if numbers else None


def _place(record: Mapping[str, Any], number: int) -> tuple[str, str, int]:
    """Prompt, session and part."""
    key = split_key(record.get("uid", ""))
    if key is not None:
        return key[0], str(key[1]), key[2]
    # The legacy trainer writes no key: the same question is the same prompt.
    return json.dumps([record.get("input"), record.get("gts")]), str(number), 0


def _rewards(record: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in record.items()
        if name not in NOT_REWARDS and isinstance(value, int | float)
    }
