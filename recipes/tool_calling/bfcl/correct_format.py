"""The share of a model's BFCL answers that have a correct format, by the format reward of the training.

The reward knows which sections an answer should have from the ground truth; BFCL has none in that form. So an answer
counts if it is any of the three forms that the training's prompt allows: thought and calls, thought and response, or
all three. Each model answer counts once, so a multi-turn test counts as often as the model was asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_ext.rewards.tags import follows_layout
from verl_ext.rewards.tool_calling import LAYOUTS


def is_correct(answer: str) -> bool:
    """Whether the stripped answer is one of the three forms."""
    return any(follows_layout(answer.strip(), layout) for layout in LAYOUTS)


def answers(result: Any) -> Iterator[str]:
    """The model's answers in a result: a text, or texts by step and turn."""
    if isinstance(result, str):
        yield result
    else:
        for part in result:
            yield from answers(part)


def count(path: Path) -> tuple[int, int]:
    """Answers in a correct format, and all answers, of one file of results."""
    right = total = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        for answer in answers(json.loads(line)["result"]):
            right, total = right + is_correct(answer), total + 1
    return right, total


def main(folder: Path) -> int:
    """Print the share of each category and of all; 1 if there is no result."""
    found = {path.stem.removesuffix("_result"): count(path) for path in sorted(folder.glob("**/*_result.json"))}
    total = sum(number for _, number in found.values())
    if not total:
        print(f"{folder} has no *_result.json with answers")
        return 1
    for name, (right, number) in found.items():
        print(f"{name:<40} {right:>6} / {number:<6} {100 * right / number if number else 0:.2f} %")
    print(f"{'correct format':<40} {sum(right for right, _ in found.values()):>6} / {total:<6} ", end="")
    print(f"{100 * sum(right for right, _ in found.values()) / total:.2f} %")
    return 0
