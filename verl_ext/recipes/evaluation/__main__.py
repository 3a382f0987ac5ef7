"""`python -m verl_ext.recipes.evaluation`."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_ext.errors import DataError, VerlExtError, printable, unknown
from verl_ext.files import write
from verl_ext.recipes.evaluation.answers import Answer, find_dump, read_answers
from verl_ext.recipes.evaluation.passes import passes


def summary(answers: Sequence[Answer], right: str | None, above: float) -> dict[str, Any]:
    """Counts, the mean of every reward, and pass@k if `right` names the reward that decides what is right.

    The mean of a reward that no answer has is None.
    """
    rewards: dict[str, float | None] = {}
    for name in answers[0].rewards:
        scored = [answer.rewards[name] for answer in answers if not math.isnan(answer.rewards[name])]
        rewards[name] = sum(scored) / len(scored) if scored else None
    result: dict[str, Any] = {"answers": len(answers), "prompts": len({answer.prompt for answer in answers})}
    result["mean"] = rewards
    if right is not None:
        if right not in rewards:
            raise DataError(unknown("reward", right, rewards))
        counts: dict[str, list[bool]] = defaultdict(list)
        for answer in answers:
            counts[answer.prompt].append(answer.rewards[right] > above)
        result["pass"] = dict(passes((sum(marks), len(marks)) for marks in counts.values()))
    return result


def text(path: Path, result: dict[str, Any]) -> str:
    """The summary as text."""
    lines = [f"{path}: {result['answers']} answers to {result['prompts']} prompts"]
    if result["unreadable_lines"]:
        lines.append(f"  {result['unreadable_lines']} unreadable line(s) left out")
    for name, value in result["mean"].items():
        lines.append(f"  mean {printable(name):<20} {'not scored' if value is None else format(value, '.4f')}")
    lines += [f"  {f'pass@{k}':<25} {value:.4f}" for k, value in result.get("pass", {}).items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Summarise dumps and return the exit status: 0 if all could be read."""
    parser = argparse.ArgumentParser(prog="python -m verl_ext.recipes.evaluation", description=__doc__)
    parser.add_argument("dumps", nargs="+", type=Path, metavar="DUMP", help="a validation_data_dir, or a file of it")
    parser.add_argument("--step", type=int, help="step of the dump in a folder (default: the last)")
    parser.add_argument("--right", metavar="REWARD", help="the reward that decides what is right, for pass@k")
    parser.add_argument("--above", type=float, default=0.5, help="values above this are right (default: 0.5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summaries there as well")
    options = parser.parse_args(arguments)
    try:
        results = {}
        for place in options.dumps:
            path = find_dump(place, options.step)
            answers, torn = read_answers(path)
            results[str(path)] = {**summary(answers, options.right, options.above), "unreadable_lines": torn}
            sys.stdout.write(text(path, results[str(path)]) + "\n")
        if options.json is not None:
            sys.stdout.flush()
            write(options.json, json.dumps(results, indent=2) + "\n")
    except VerlExtError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
