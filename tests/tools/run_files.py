"""Files that runs write: dumps of advantages, verl's rollouts, and logs."""

import itertools
import json
from types import SimpleNamespace
from unittest import mock

import numpy as np

from verl_ext import Batch, Settings, build
from verl_ext.advantages import dump
from verl_ext.cli import main
from verl_ext.run import Run

# Three prompts with four responses each. Of the last prompt no response is correct.
CORRECT = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
FORMAT = [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
LENGTHS = [3, 5, 2, 8, 4, 4, 9, 1, 7, 6, 2, 3]
OUTPUTS = [1, 2, 1, 1, 1, 1, 3, 1, 1, 1, 1, 1]
"""The number of rows of verl's batch of each response."""
PROMPT_OF_ROW = [row // 4 for row in range(12)]
UIDS = [f"p{prompt}" for prompt in PROMPT_OF_ROW]
KEYS = "algorithm.rewards.keys=[correct,format]"
ACCURACY_KEY = "algorithm.rewards.accuracy_key=correct"
CLOCK = itertools.count(1)
"""The time of a dump, by default: one second after the last one."""


def run_command(capsys, *arguments, status=0):
    """Run the command line and return what it printed, or its errors if the exit status is not 0."""
    assert main([str(argument) for argument in arguments]) == status
    printed = capsys.readouterr()
    return printed.err if status else printed.out


def example_batch(keys=("correct", "format"), correct=CORRECT, **more):
    """Return the responses as an estimator sees them."""
    correct = np.array(correct)
    rewards = {"correct": correct, "format": np.array(FORMAT), "score": 2 * correct + FORMAT}
    columns = [rewards[key] for key in keys]
    more |= {"keys": keys, "lengths": LENGTHS, "outputs": OUTPUTS, "accuracy": correct}
    return Batch.of(np.stack(columns, axis=1), UIDS, **more)


def write_dump(folder, steps, *, name="gdpo", algorithm=None, after_step=0, correct_at_step=None, times=CLOCK):
    """Dump as a run does that starts after a step; return the folder and the advantages of the dumped steps.

    All steps up to the last one are computed, and those of `steps` are dumped. `correct_at_step` has the reward
    `correct` of some steps. `times` are the times of the start and of each dumped step.
    """
    sections = {"rewards": {"keys": ["correct", "format"]}, "verl_ext": {"dump_dir": str(folder)}}
    sections |= algorithm or {}
    settings = Settings.parse(sections)
    trainer = SimpleNamespace(global_steps=0, local_trigger_step=0)
    run = Run(name, settings, build(name, settings), trainer=trainer, after_step=after_step)
    clock = SimpleNamespace(time=iter(map(float, times)).__next__)
    dumped = []
    for step in range(1, max(steps) + 1):
        correct = (correct_at_step or {}).get(step, CORRECT)
        batch = example_batch(correct=correct, conditions=settings.rewards.conditions)
        if settings.rewards.weights is not None:
            batch = batch.with_weights(settings.rewards.weights)
        result = run.chain(batch, run.state)
        run.state = result.state
        trainer.global_steps = step
        if step in steps:
            with mock.patch.object(dump, "time", clock):
                dump.write(run, batch, result.advantages)
            assert not run.warned
            dumped.append(result.advantages)
    return folder, np.concatenate(dumped)


def rollout_lines(step=1, **changes):
    """Return the lines of one step of verl's default trainer, with the rewards as in its validation, and tokens."""
    lines = []
    for row, prompt in enumerate(PROMPT_OF_ROW):
        correct = CORRECT[row]
        format_reward = FORMAT[row]
        session = row % 4
        line = {
            "input": f"what is {prompt}?",
            "output": "text",
            "tokens": LENGTHS[row],
            "gts": str(prompt),
            "score": 2 * correct + format_reward,
            "step": step,
            "correct": correct,
            "format": format_reward,
            "acc": bool(correct),
            "uid": f"p{prompt}-{step}_{session}_0",
        }
        lines.append(line | changes)
    return lines


def without(lines, *keys):
    """Return the lines without some of their entries."""
    return [{key: value for key, value in line.items() if key not in keys} for line in lines]


def write_rollouts(folder, *steps, name=None):
    """Write a file of JSON lines for each step, by default named after the step, and return the folder."""
    folder.mkdir(exist_ok=True)
    for lines in steps:
        stem = name or lines[0].get("step", 0)
        write_json_lines(folder / f"{stem}.jsonl", lines)
    return folder


def write_json_lines(path, records):
    """Write one line per record."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def log_line(step, **metrics):
    """Return a line of verl's file logger."""
    return json.dumps({"step": step, "data": metrics}) + "\n"


def write_log(path, *records):
    """Write a log with these steps, each a pair of its number and its metrics, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(log_line(step, **metrics) for step, metrics in records))
    return path


def write_log_of_steps(path, steps):
    """Write a log whose steps, from 1, have these metrics, and return the path."""
    return write_log(path, *enumerate(steps, start=1))
