"""Rewards by turn against two others, end to end: one advantage a response, and the construction that is often used.

    python scripts/evidence/turns.py train --seeds 1 2 3 4 5     # recipes/turns, one training after the other
    python scripts/evidence/turns.py table
    python scripts/evidence/turns.py simulate                    # without a model: policies of a few numbers, 100 seeds

The last one, `naive`, centres the reward of each turn among the responses that reached it, and then adds up what is
still to come. So it has no feeling for what a decision to stop costs: see the page on turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from verl_ext import Batch, Settings, Step, Turns, build

ROOT = Path(__file__).parents[2]
ARMS = {
    "by_outcome": ("by_outcome",),
    "by_turn": ("by_turn",),
    "naive": ("by_turn", "algorithm.compose.steps=[weigh_and_sum,turns:Naive]"),
}
MOST, SHARE = 3.0, 0.9
"""Right keys of a perfect response, and the share of them that counts as learnt."""


@dataclass(frozen=True)
class Naive(Step):
    """`sum_{s >= t} (r_is - mean of r_s over those that reached turn s)`: a step for comparison, not for use."""

    name: ClassVar[str] = "naive"
    centres: ClassVar[bool] = False

    def apply(self, values: np.ndarray, batch: Batch) -> np.ndarray:
        own = batch.rewards.sum(axis=1, keepdims=True)
        centred = own - batch.groups.broadcast(batch.groups.mean(own))
        return Turns(batch.turns.number, columns=(0,)).returns(centred)


def train(folder: Path, arms: list[str], seeds: list[int], more: list[str]) -> None:
    """Run what is not there yet."""
    for seed in seeds:
        for arm in arms:
            output = folder / f"{arm}-{seed}"
            if (output / "done").exists():
                continue
            recipe, *overrides = ARMS[arm]
            environment = {
                **os.environ,
                "OUTPUT_DIR": str(output),
                "PYTHONPATH": str(Path(__file__).parent),
                "PYTHON": sys.executable,
            }
            command = [str(ROOT / "recipes/turns/run.sh"), recipe, *overrides, f"data.seed={seed}", *more]
            output.mkdir(parents=True, exist_ok=True)
            with open(output / "log.txt", "w") as log:
                subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)
            (output / "done").touch()


def table(folder: Path) -> None:
    """Print for each arm the right keys and the turns of its last five steps, and the steps until it has learnt."""
    print(f"| arm | seed | right keys of {MOST:.0f}, last 5 steps | turns, last 5 steps | steps to {SHARE:.0%} |")
    print("|---|---|---|---|---|")
    for arm in ARMS:
        for path in sorted(folder.glob(f"{arm}-*/metrics.jsonl")):
            steps = [json.loads(line)["data"] for line in path.read_text().splitlines()]
            right = [step["reward/score/mean"] for step in steps if "reward/score/mean" in step]
            turns = [step["num_turns/mean"] / 2 for step in steps if "num_turns/mean" in step]
            reached = next((at for at, value in enumerate(right, start=1) if value >= SHARE * MOST), None)
            seed, last = path.parent.name.rpartition("-")[2], (np.mean(right[-5:]), np.mean(turns[-5:]))
            print(f"| {arm} | {seed} | {last[0]:.2f} | {last[1]:.2f} | {reached or f'not in {len(right)}'} |")


CHAINS = {
    "by_outcome": ({}, ["weigh_and_sum", "centre"]),
    "by_turn": ({"keys": ["right"], "by_turn": ["right"]}, ["weigh_and_sum", "centre"]),
    "naive": ({"keys": ["right"], "by_turn": ["right"]}, ["weigh_and_sum", "turns:Naive"]),
}


def simulated(arm: str, seed: int, steps: int, prompts: int, n: int, most: int, goes_on: float) -> list[float]:
    """Right keys a response, step by step, of sessions of at most so many turns.

    Each turn decides to press the right key, at first half of the time, and to go on. The policy has a number for each
    decision, and its step is the mean gradient of a response.
    """
    rewards, chosen = CHAINS[arm]
    chain = build("compose", Settings.parse({"rewards": rewards, "compose": {"steps": chosen}}))
    draw, found, labels = np.random.default_rng(seed), [], np.repeat(np.arange(prompts), n)
    logits = np.tile([0.0, np.log(goes_on / (1 - goes_on))], (most, 1))
    for _ in range(steps):
        chance = 1 / (1 + np.exp(-logits))
        choices = draw.random((prompts * n, most, 2)) < chance
        turns = Turns.of_counts(1 + np.cumprod(choices[:, :-1, 1], axis=1).sum(axis=1), columns=(0,))
        right = choices[turns.response, turns.number, 0].astype(float)
        total = np.bincount(turns.response, right)
        if arm == "by_outcome":
            advantages = chain(Batch.of(total[:, None], labels.tolist())).advantages[turns.response]
        else:
            batch = Batch.of(right[:, None], labels[turns.response].tolist(), keys=("right",), turns=turns)
            advantages = chain(batch).advantages
        gradient = np.zeros_like(logits)
        np.add.at(
            gradient, turns.number, advantages[:, None] * (choices[turns.response, turns.number] - chance[turns.number])
        )
        gradient[-1, 1] = 0.0  # after the last turn it is over anyway
        logits += gradient / (prompts * n)
        found.append(float(total.mean()))
    return found


def simulate(seeds: int = 100, steps: int = 250) -> None:
    """Print the steps until the mean of five steps has learnt, its quartiles over the seeds."""
    print(
        "| turns | prompts x responses | arm | learnt, of the seeds | steps to it: quartiles | right keys at the end |"
    )
    print("|---|---|---|---|---|---|")
    for most, goes_on, prompts, n in ((3, 0.5, 8, 8), (3, 0.5, 4, 2), (10, 0.9, 8, 8)):
        for arm in CHAINS:
            reached, last = [], []
            for seed in range(seeds):
                curve = simulated(arm, seed, steps, prompts, n, most, goes_on)
                means = np.convolve(curve, np.full(5, 0.2), mode="valid")
                at = np.flatnonzero(means >= SHARE * most)
                reached.append(at[0] + 5 if len(at) else np.inf)
                last.append(means[-1])
            quartiles = ", ".join(f"{value:.0f}" for value in np.quantile(reached, [0.25, 0.5, 0.75], method="nearest"))
            learnt, size = f"{np.isfinite(reached).sum()} of {seeds}", f"{prompts} x {n}"
            print(f"| {most} | {size} | {arm} | {learnt} | {quartiles} | {np.mean(last):.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "table", "simulate"])
    parser.add_argument("--folder", type=Path, default=Path("outputs/turns-seeds"))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of verl, for all trainings")
    options = parser.parse_args()
    if options.what == "train":
        train(options.folder, options.arms, options.seeds, options.set)
    elif options.what == "table":
        table(options.folder)
    else:
        simulate()


if __name__ == "__main__":
    main()
