"""Rollouts as verl writes them, and as `dump_dir` does."""

from __future__ import annotations

import json

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.integration.advantage.dump import columns, save
from verl_ext.settings import Settings

KEYS = "algorithm.rewards.keys=[right,form]"
RIGHT = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
FORM = [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
LENGTHS = [3, 5, 2, 8, 4, 4, 9, 1, 7, 6, 2, 3]
"""Three prompts with four answers each."""


def entries(step=1, **changes):
    """The lines of one step of verl's default trainer, with the rewards as in its validation."""
    return [
        {
            "input": f"what is {row // 4}?",
            "output": "x" * LENGTHS[row],
            "gts": str(row // 4),
            "score": 2 * RIGHT[row] + FORM[row],
            "step": step,
            "right": RIGHT[row],
            "form": FORM[row],
            "acc": RIGHT[row],
            "uid": f"p{row // 4}-{step}_{row % 4}_0",
        }
        | changes
        for row in range(12)
    ]


def without(lines, *keys):
    return [{key: value for key, value in line.items() if key not in keys} for line in lines]


def write(folder, *steps, name=None):
    """One file a step."""
    folder.mkdir(exist_ok=True)
    for lines in steps:
        path = folder / f"{name or lines[0].get('step', 0)}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def dump(folder, *steps, advantage=0.0):
    """A parquet file for each step."""
    settings = Settings.parse({"rewards": {"keys": ["right", "form"], "weights": [2.0, 1.0]}})
    uids = [f"p{row // 4}" for row in range(12)]
    rewards = np.stack([RIGHT, FORM], axis=1)
    batch = Batch.of(rewards, uids, keys=("right", "form"), lengths=LENGTHS, accuracy=RIGHT)
    for step in steps:
        where = {"step": np.full(12, step), "update": np.zeros(12, dtype=int), "estimator": ["dgpo"] * 12, "uid": uids}
        save(
            folder / f"advantages-{step:08d}-000.parquet",
            where | {"advantage": np.full(12, advantage)} | columns(settings, batch),
        )
    return folder
