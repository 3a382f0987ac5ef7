"""What runs write: dumps of advantages, verl's rollouts, and logs."""

import itertools
import json
import os

import numpy as np

from verl_ext import Batch, Settings, build
from verl_ext.advantages import dump as writer
from verl_ext.cli import main

RIGHT = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
FORM = [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
LENGTHS = [3, 5, 2, 8, 4, 4, 9, 1, 7, 6, 2, 3]
"""Three prompts with four responses each. Of the last prompt no response is correct."""
OUTPUTS = [1, 2, 1, 1, 1, 1, 3, 1, 1, 1, 1, 1]
"""Rows of the batch of each response."""
UIDS = [f"p{row // 4}" for row in range(12)]
KEYS = "algorithm.rewards.keys=[right,form]"
CLOCK = itertools.count(1)


def call(capsys, *arguments, status=0):
    """Run the command line; return what it printed, or its errors."""
    assert main([str(argument) for argument in arguments]) == status
    written = capsys.readouterr()
    return written.err if status else written.out


def batch(keys=("right", "form"), right=RIGHT, **more):
    """The three prompts as an estimator sees them."""
    rewards = {"right": right, "form": FORM, "score": 2 * np.array(right) + FORM}
    matrix = np.stack([rewards[key] for key in keys], axis=1)
    return Batch.of(matrix, UIDS, keys=keys, lengths=LENGTHS, accuracy=right, outputs=OUTPUTS, **more)


def dump(folder, steps, *, name="gdpo", algorithm=None, start=0, rights=None, times=CLOCK):
    """The folder of a run that starts after a step; return it and the advantages of all its steps.

    Each step of `rights` has its own rewards; all steps up to the last are computed, those of `steps` are written, at
    such times: without them later than all that was written before.
    """
    settings = Settings.parse({"rewards": {"keys": ["right", "form"]}} | (algorithm or {}))
    chain = build(name, settings)
    where, times = writer.new_folder(folder, start), iter(times)
    state, written = chain.init(), []
    for step in range(1, max(steps) + 1):
        given = batch(right=(rights or {}).get(step, RIGHT), conditions=settings.rewards.conditions)
        result = chain(given, state)
        state = result.state
        if step not in steps:
            continue
        written.append(result.advantages)
        first = {"step": [step] * 12, "update": [0] * 12, "uid": UIDS, "advantage": result.advantages}
        about = {"estimator": name, "algorithm": dict(settings.given), "loss_agg_mode": settings.loss_agg_mode}
        about |= {"step": step, "update": 0}
        path = where / f"advantages-{step:08d}-000.parquet"
        writer.save(path, first | writer.columns(settings, given), about)
        os.utime(path, (time := next(times), time))
    return folder, np.concatenate(written)


def entries(step=1, **changes):
    """The lines of one step of verl's default trainer, with the rewards as in its validation, and tokens."""
    return [
        {
            "input": f"what is {row // 4}?",
            "output": "text",
            "tokens": LENGTHS[row],
            "gts": str(row // 4),
            "score": 2 * RIGHT[row] + FORM[row],
            "step": step,
            "right": RIGHT[row],
            "form": FORM[row],
            "acc": bool(RIGHT[row]),
            "uid": f"p{row // 4}-{step}_{row % 4}_0",
        }
        | changes
        for row in range(12)
    ]


def without(lines, *keys):
    return [{key: value for key, value in line.items() if key not in keys} for line in lines]


def rollouts(folder, *steps, name=None):
    """One file of JSON lines a step."""
    folder.mkdir(exist_ok=True)
    for lines in steps:
        path = folder / f"{name or lines[0].get('step', 0)}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def line(step, **data):
    """A line of verl's file logger."""
    return json.dumps({"step": step, "data": data}) + "\n"


def log(path, *records):
    """A log with such steps, each with such metrics."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line(step, **data) for step, data in records))
    return path
