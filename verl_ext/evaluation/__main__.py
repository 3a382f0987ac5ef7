"""`python -m verl_ext.evaluation`."""

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
from verl_ext.evaluation.answers import Answer, find_dump, read_answers
from verl_ext.evaluation.passes import passes


def summary(answers: Sequence[Answer], right: str | None, above: float) -> dict[str, Any]:
    """Counts, the mean of every reward, and pass@k if a reward says what is right."""
    rewards = {}
    for name in answers[0].rewards:
        scored = [answer.rewards[name] for answer in answers if not math.isnan(answer.rewards[name])]
        rewards[name] = sum(scored) / len(scored) if scored else math.nan
    found: dict[str, Any] = {"answers": len(answers), "prompts": len({answer.prompt for answer in answers})}
    found["mean"] = rewards
    if right is not None:
        if right not in rewards:
            raise DataError(unknown("reward", right, rewards))
        counts: dict[str, list[bool]] = defaultdict(list)
        for answer in answers:
            counts[answer.prompt].append(answer.rewards[right] > above)
        found["pass"] = dict(passes((sum(marks), len(marks)) for marks in counts.values()))
    return found


def text(path: Path, found: dict[str, Any]) -> str:
    """The summary for a reader."""
    lines = [f"{path}: {found['answers']} answers to {found['prompts']} prompts"]
    if found["unreadable_lines"]:
        lines.append(f"  {found['unreadable_lines']} unreadable line(s) left out")
    lines += [f"  mean {printable(name):<20} {value:.4f}" for name, value in found["mean"].items()]
    lines += [f"  {f'pass@{k}':<25} {value:.4f}" for k, value in found.get("pass", {}).items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Summarise dumps; the exit status is 0 when all could be read."""
    parser = argparse.ArgumentParser(prog="python -m verl_ext.evaluation", description=__doc__)
    parser.add_argument("dumps", nargs="+", type=Path, metavar="DUMP", help="a validation_data_dir, or a file of it")
    parser.add_argument("--step", type=int, help="of the dump in a folder (default: the last)")
    parser.add_argument("--right", metavar="REWARD", help="the reward that says what is right, for pass@k")
    parser.add_argument("--above", type=float, default=0.5, help="values above it are right (default: 0.5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summaries there as well")
    options = parser.parse_args(arguments)
    try:
        found = {}
        for place in options.dumps:
            path = find_dump(place, options.step)
            answers, torn = read_answers(path)
            found[str(path)] = {**summary(answers, options.right, options.above), "unreadable_lines": torn}
            sys.stdout.write(text(path, found[str(path)]) + "\n")
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except VerlExtError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
