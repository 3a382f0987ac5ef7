"""Compute the fraction of a model's BFCL responses with a correct format, by the format reward of the training.

The reward takes the expected sections of a response from the ground truth, which BFCL does not have in that form. So a
response counts as correct if it has one of the three layouts that the training prompt allows and its ground truths use:
reasoning and calls, reasoning and response, or all three. As in the reward, the calls themselves are not checked: an
invalid line in `<tool_call>` or a call of `None` does not change the format. Each response of the model counts once, so
a multi-turn test counts several times. Neither ToolRL's nor GDPO's code says how the published number was computed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_ext.rewards.tags import follows_layout
from verl_ext.rewards.tool_calling import LAYOUTS


def is_correct(response: str) -> bool:
    """Return whether the stripped response has one of the three layouts."""
    return any(follows_layout(response.strip(), layout) for layout in LAYOUTS)


def responses(result: Any) -> Iterator[str]:
    """Yield the responses of the model in a result, which is a string or nested lists of strings by turn and step."""
    if isinstance(result, str):
        yield result
    else:
        for part in result:
            yield from responses(part)


def count(path: Path) -> Counter[str]:
    """Count the `correct` and `total` responses of a file, and the `failed` tests, which have a traceback instead."""
    counts: Counter[str] = Counter()
    with path.open(encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            if "traceback" in record:
                counts["failed"] += 1
            else:
                correct = [is_correct(response) for response in responses(record["result"])]
                counts.update(correct=sum(correct), total=len(correct))
    return counts


def main(folder: Path) -> int:
    """Print the percentage of each category and of all responses. Return 1 if there is no result."""
    categories = {path.stem.removesuffix("_result"): count(path) for path in sorted(folder.glob("**/*_result.json"))}
    every = sum(categories.values(), Counter())
    if not every["total"]:
        print(f"error: {folder} has no *_result.json with responses. Use a folder that `run.py generate` wrote.")
        return 1
    for name, counts in {**categories, "correct format": every}.items():
        percentage = 100 * counts["correct"] / max(1, counts["total"])
        print(f"{name:<40} {counts['correct']:>6} / {counts['total']:<6} {percentage:.2f}%")
    if every["failed"]:
        print(
            f"warning: {every['failed']} tests are excluded, because bfcl-eval failed on them. See 'traceback' in the "
            "results."
        )
    return 0
