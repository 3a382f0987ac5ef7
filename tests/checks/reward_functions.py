"""Reward functions of users, with and without mistakes. Tests copy this file and have `check --try-reward` call it."""

import asyncio
import os
import re
import subprocess
from pathlib import Path

import numpy

CALLS = iter(range(100))
ENDLESS = re.compile(r"(\d+ ?)+x")
"""A pattern that takes years for a long row of digits."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=1.0):
    """Return components with a number, with None, with NaN, with a number above the range, and only for some rows."""
    if solution_str.endswith("raise") or data_source == "unknown":
        raise KeyError("boom")
    is_correct = float(solution_str == ground_truth)
    result = {
        "score": 2 * is_correct,
        "correct": is_correct,
        "format": bonus,
        "nothing": float("nan") if solution_str else None,
        "long": 10**400,
    }
    if is_correct:
        result["rare"] = 1.0
    return result


async def is_asynchronous(**arguments):
    await asyncio.sleep(0)
    return compute_score(**arguments)


def returns_a_coroutine(**arguments):
    return is_asynchronous(**arguments)


def reads_the_rollout(data_source, solution_str, ground_truth, extra_info):
    counts = [extra_info["num_turns"], extra_info["max_global_steps"], len(extra_info["rollout_reward_scores"])]
    return {"score": 0.0, "correct": float(min(counts) == 0), "format": 1.0}


def reads_the_level(extra_info, **arguments):
    return {"score": 1.0, "correct": 1.0, "format": extra_info["level"]}


def exits(**arguments):
    raise SystemExit(0)


def raises_stop_iteration(**arguments):
    return next(iter([]))


def returns_per_turn_rewards(data_source, solution_str, ground_truth, extra_info, plain=False):
    entries = [float(word == ground_truth) for word in solution_str.split()]
    return {"score": 0.0, "correct": 0.0, "format": entries if plain else str(entries)}


def returns_a_rubric(data_source, solution_str, ground_truth, extra_info, mistake=None):
    from verl_ext import rubric

    values, weights = [solution_str == ground_truth, 0.5], [3, -1]
    if mistake == "fewer criteria" and not solution_str:
        values, weights = [0], [3]
    return {"score": 0.0, "correct": 0.0, "format": values if mistake == "a list" else rubric(values, weights)}


def differs_when_repeated(**arguments):
    count = next(CALLS)
    return {"score": count, "correct": count, "format": 1.0}


def returns_equal_rewards(solution_str, ground_truth, **arguments):
    is_correct = float(solution_str == ground_truth)
    return {"score": is_correct, "correct": is_correct, "format": is_correct}


def reads_one_template(solution_str, ground_truth, **arguments):
    is_correct = float(solution_str == "#### " + ground_truth)
    return {"score": is_correct, "correct": is_correct, "format": 1.0}


def rewards_integers(solution_str, ground_truth, **arguments):
    is_integer = isinstance(ground_truth, str) and ground_truth.isdigit()
    is_correct = float(is_integer and ground_truth in solution_str.split())
    return {"score": is_correct, "correct": is_correct, "format": float(len(solution_str) > 2)}


def penalizes_empty_responses(solution_str, ground_truth, penalty=-1, **arguments):
    return {
        "score": 0.0,
        "correct": 1.0 + (solution_str == ground_truth),
        "format": 0.0 if solution_str else float(penalty),
    }


def hangs(solution_str, ground_truth, **arguments):
    if solution_str == "7 7":
        ENDLESS.match("7" * 60)
    return {"score": 1.0, "correct": 1.0, "format": 0.0}


def hangs_with_a_child(solution_str, **arguments):
    if solution_str == "7 7":
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(__file__).with_name("child").write_text(str(child.pid))
    return hangs(solution_str, **arguments)


def ends_its_process(solution_str, **arguments):
    if solution_str == "7 7":
        os._exit(3)
    return hangs(solution_str, **arguments)


def has_a_bug(data_source, solution_str, ground_truth, extra_info):
    return helper_with_a_bug(ground_truth)


def helper_with_a_bug(truth):
    return truth.no_such_attribute


def has_other_parameters(solution_str, ground_truth):
    return 1.0


async def is_asynchronous_with_other_parameters(solution_str, ground_truth):
    return 1.0


def returns_no_score(**arguments):
    return {"correct": 1.0, "format": 1.0}


def returns_this_score(score=None, **arguments):
    """Return the score of the setting, or a score by name that cannot be written in a setting."""
    scores = {"infinity": float("inf"), "float32": numpy.float32(1), "long": 10**400}
    return {"score": scores.get(score, score), "correct": 1.0, "format": 1.0}
