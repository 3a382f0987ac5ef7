"""Summarize a validation run of verl: the mean of every reward, and pass@k.

    python recipes/common/evaluation.py FOLDER --accuracy-key correctness

FOLDER is the `trainer.validation_data_dir` of the run. The command reads the last dump that verl wrote there.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the script runs from every folder
from verl_ext.tools.compare.read import read_rollouts


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: 1 - C(n-c, k) / C(n, k), if c of n samples are correct.

    >>> pass_at_k(1, 4, 1), pass_at_k(1, 4, 2), pass_at_k(0, 4, 4)
    (0.25, 0.5, 0.0)
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def passes(prompts: Collection[Sequence[bool]]) -> dict[int, float]:
    """Return the mean pass@k over prompts for k = 1, 2, 4, ... and for the smallest number of samples of a prompt."""
    counts = [(sum(marks), len(marks)) for marks in prompts]
    fewest = min(samples for _, samples in counts)
    ks = [2**power for power in range(fewest.bit_length()) if 2**power < fewest] + [fewest]
    return {k: sum(pass_at_k(correct, samples, k) for correct, samples in counts) / len(counts) for k in ks}


def summary(path: Path, accuracy_key: str | None, threshold: float) -> dict[str, Any]:
    """Return counts, the mean of every reward, and pass@k by the reward `accuracy_key`."""
    responses = read_rollouts(path)
    means = {name: float(np.nanmean(values)) for name, values in responses.rewards.items()}
    found = {"responses": len(responses.table), "prompts": len(responses.groups), "mean": means}
    if accuracy_key is None:
        return found
    correct = responses.reward(accuracy_key, "--accuracy-key") > threshold
    marks = responses.table.assign(correct=correct).groupby("uid")["correct"]
    return {**found, "pass": passes(marks.agg(list))}


def find(folder: Path) -> Path:
    """Return the dump of the last step in a folder."""
    dumps = [path for path in folder.glob("*.jsonl") if path.stem.isdigit()]
    if not dumps:
        raise ValueError(
            "the folder contains no dump of a validation (<step>.jsonl). Use the folder that was the run's "
            "trainer.validation_data_dir."
        )
    return max(dumps, key=lambda path: int(path.stem))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the summary of each folder, and return the exit status: 0 if all folders could be read."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a trainer.validation_data_dir")
    parser.add_argument(
        "--accuracy-key",
        metavar="REWARD",
        help="reward that decides whether a response is correct (default: no pass@k)",
    )
    parser.add_argument(
        "--accuracy-threshold",
        type=float,
        default=0.5,
        metavar="VALUE",
        help="value above which a response counts as correct (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the summaries to this file")
    options = parser.parse_args(arguments)
    summaries = {}
    for folder in options.folders:
        try:
            path = find(folder)
            summaries[str(path)] = summary(path, options.accuracy_key, options.accuracy_threshold)
        except ValueError as error:
            print(f"error: {folder}: {error}", file=sys.stderr)
            return 1
        print(text(path, summaries[str(path)]))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(summaries, indent=2) + "\n")
    return 0


def text(path: Path, found: Mapping[str, Any]) -> str:
    """Return a summary as text."""
    lines = [f"{path}: {found['responses']} responses to {found['prompts']} prompts"]
    for name, mean in found["mean"].items():
        lines.append(f"  mean {name:<20} {mean:.4f}")
    return "\n".join(lines + [f"  {f'pass@{k}':<25} {rate:.4f}" for k, rate in found.get("pass", {}).items()])


if __name__ == "__main__":
    sys.exit(main())
