"""A run whose reward function is tried on rows of data."""

import pandas
import pytest

from verl_ext.cli import main

FUNCTION = "reward.custom_reward_function"
REWARD = """
import os, re, subprocess
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=1.0):
    if solution_str.endswith("raise") or data_source == "unknown":
        raise KeyError("boom")
    right = float(solution_str == ground_truth)
    nothing = None if not solution_str else float("nan")
    rare = {"rare": 1.0} if right else {}
    return rare | {"score": 2 * right, "correct": right, "format": bonus, "nothing": nothing, "long": 10**400}

async def later(**given):
    return compute_score(**given)

def reads_the_rollout(data_source, solution_str, ground_truth, extra_info):
    given = [extra_info["num_turns"], extra_info["max_global_steps"], len(extra_info["rollout_reward_scores"])]
    return {"score": 0.0, "correct": float(min(given) == 0), "format": 1.0}

def leaves(**given):
    raise SystemExit(0)

def finds_nothing(**given):
    return next(iter([]))

def returns_a_coroutine(**given):
    return later(**given)

def turns(data_source, solution_str, ground_truth, extra_info, plain=False):
    entries = [float(word == ground_truth) for word in solution_str.split()]
    return {"score": 0.0, "correct": 0.0, "format": entries if plain else str(entries)}

def items(data_source, solution_str, ground_truth, extra_info, wrong=None):
    from verl_ext import rubric
    met = [0] if wrong == "fewer" and not solution_str else [solution_str == ground_truth, 0.5]
    return {"score": 0.0, "correct": 0.0, "format": met if wrong == "plain" else rubric(met, [3, -1][:len(met)])}

def random(**given):
    found = next(calls)
    return {"score": found, "correct": found, "format": 1.0}

def copied(solution_str, ground_truth, **given):
    right = float(solution_str == ground_truth)
    return {"score": right, "correct": right, "format": right}

def never(solution_str, ground_truth, **given):
    right = float(solution_str == "#### " + ground_truth)
    return {"score": right, "correct": right, "format": 1.0}

calls = iter(range(100))

def hangs(solution_str, ground_truth, **given):
    if solution_str == "7 7":
        re.match(r"(\\d+ ?)+x", "7" * 60)
    return {"score": 1.0, "correct": 1.0, "format": 0.0}

def hangs_with_a_child(solution_str, **given):
    if solution_str == "7 7":
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(__file__).with_name("child").write_text(str(child.pid))
    return hangs(solution_str, **given)

def ends(solution_str, **given):
    if solution_str == "7 7":
        os._exit(3)
    return hangs(solution_str, **given)

def has_a_bug(data_source, solution_str, ground_truth, extra_info):
    return helper(ground_truth)

def helper(truth):
    return truth.foo

def has_other_parameters(solution_str, ground_truth):
    return 1.0

async def has_other_parameters_later(solution_str, ground_truth):
    return 1.0

def returns_no_score(**given):
    return {"correct": 1.0, "format": 1.0}

def reads_the_level(extra_info, **given):
    return {"score": 1.0, "correct": 1.0, "format": extra_info["level"]}

def integers(solution_str, ground_truth, **given):
    right = float(isinstance(ground_truth, str) and ground_truth.isdigit() and ground_truth in solution_str.split())
    return {"score": right, "correct": right, "format": float(len(solution_str) > 2)}

def penalizes(solution_str, ground_truth, penalty=-1, **given):
    paid = float(penalty) if not solution_str else 0.0
    return {"score": 0.0, "correct": 1.0 + (solution_str == ground_truth), "format": paid}

def returns(score=None, **given):
    odd = {"infinity": float("inf"), "float32": __import__("numpy").float32(1), "long": 10**400}
    return {"score": odd.get(score, score), "correct": 1.0, "format": 1.0}
"""


@pytest.fixture
def tried(tmp_path, capsys):
    """Exit status and output of one call on two rows."""
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "answers.jsonl").write_text('"2"\n["ra", "raise"]\n')
    rows = [{"data_source": "x", "prompt": [], "reward_model": {"ground_truth": str(at)}} for at in (1, 2, 3)]
    pandas.DataFrame(rows).to_parquet(tmp_path / "train.parquet")
    given = [
        *("actor_rollout_ref.rollout.n=8", f"data.train_files={tmp_path}/train.parquet"),
        *(f"{FUNCTION}.path={tmp_path}/reward.py", "actor_rollout_ref.actor.use_dynamic_bsz=True"),
        *("--try-reward", "--rows", "2"),
    ]

    def run(*arguments, keys="correct,format", preset="gdpo"):
        named = [f"algorithm.rewards.keys=[{keys}]"] if keys else []
        status = main(["check", f"+verl_ext={preset}", *given, *named, *arguments])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


@pytest.fixture
def given(tried, tmp_path):
    """Exit status and output of one call on rows of these truths, sources and messages, of training or validation."""

    def run(truths, sources=None, contents=None, *, words=(), file="train", without=(), renamed=None):
        usual = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
        rows = {
            "data_source": sources or ["x"] * len(truths),
            "prompt": contents or [usual] * len(truths),
            "reward_model": [{"ground_truth": truth} for truth in truths],
        }
        table = pandas.DataFrame(rows).drop(columns=[*without]).rename(columns=renamed or {})
        table.to_parquet(tmp_path / f"{file}.parquet", row_group_size=7)
        return tried(f"data.val_files={tmp_path}/val.parquet", *words)

    return run
