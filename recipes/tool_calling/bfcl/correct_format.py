"""The share of a model's BFCL answers that have a correct format, by the format reward of the training.

The reward knows from the ground truth which sections an answer should have; BFCL has no ground truth in that form. So
an answer is correct in any of the three forms that the training's prompt allows and its ground truths have: thought
and calls, thought and response, or all three. As in the reward, the calls themselves are not checked: a bad line in
`<tool_call>` or a call of `None` does not change the format. Each answer of the model counts once, so a multi-turn test
counts several times. Neither ToolRL's nor GDPO's code says how the published figure was counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_ext.rewards.tags import follows_layout
from verl_ext.rewards.tool_calling import LAYOUTS


def is_correct(answer: str) -> bool:
    """Whether the stripped answer is one of the three forms."""
    return any(follows_layout(answer.strip(), layout) for layout in LAYOUTS)


def answers(result: Any) -> Iterator[str]:
    """The answers of the model in a result: a string, or nested lists of strings by turn and step."""
    if isinstance(result, str):
        yield result
    else:
        for part in result:
            yield from answers(part)


def count(path: Path) -> Counter[str]:
    """Count `right` and `total` answers of a file, and `failed` tests, which have a traceback of bfcl-eval instead."""
    counts: Counter[str] = Counter()
    with path.open(encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            if "traceback" in record:
                counts["failed"] += 1
            else:
                correct = [is_correct(answer) for answer in answers(record["result"])]
                counts.update(right=sum(correct), total=len(correct))
    return counts


def main(folder: Path) -> int:
    """Print the share of each category and of all; return 1 if there is no result."""
    categories = {path.stem.removesuffix("_result"): count(path) for path in sorted(folder.glob("**/*_result.json"))}
    every = sum(categories.values(), Counter())
    if not every["total"]:
        print(f"{folder} has no *_result.json with answers")
        return 1
    for name, counts in {**categories, "correct format": every}.items():
        share = 100 * counts["right"] / max(1, counts["total"])
        print(f"{name:<40} {counts['right']:>6} / {counts['total']:<6} {share:.2f} %")
    if every["failed"]:
        print(f"left out {every['failed']} tests on which bfcl-eval failed: see 'traceback' in the results")
    return 0
