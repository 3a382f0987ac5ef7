"""What runs write: dumps of advantages, verl's rollouts, and logs."""

import itertools
import json
from types import SimpleNamespace
from unittest import mock

import numpy as np

from verl_ext import Batch, Settings, build
from verl_ext.advantages import dump as writer
from verl_ext.cli import main
from verl_ext.run import Run

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
    """Dump as a run does that starts after a step; return the folder and the advantages of the dumped steps.

    Each step of `rights` has its own rewards. All steps up to the last one are computed, and those of `steps` are
    dumped. `times` are the times of the start and of each dumped step, by default later than all earlier dumps.
    """
    sections = {"rewards": {"keys": ["right", "form"]}, "verl_ext": {"dump_dir": str(folder)}} | (algorithm or {})
    settings = Settings.parse(sections)
    trainer = SimpleNamespace(global_steps=0, local_trigger_step=0)
    run = Run(name, settings, build(name, settings), trainer=trainer, after_step=start)
    clock = SimpleNamespace(time=iter(map(float, times)).__next__)
    dumped = []
    for step in range(1, max(steps) + 1):
        responses = batch(right=(rights or {}).get(step, RIGHT), conditions=settings.rewards.conditions)
        result = run.chain(responses, run.state)
        run.state = result.state
        trainer.global_steps = step
        if step in steps:
            dumped.append(result.advantages)
            with mock.patch.object(writer, "time", clock):
                writer.write(run, responses, result.advantages)
            assert not run.warned
    return folder, np.concatenate(dumped)


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
