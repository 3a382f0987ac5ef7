"""Fixtures that try a reward function of `reward_functions.py` on rows of data."""

import shutil
from pathlib import Path

import pandas
import pytest

from verl_ext.cli import main

REWARD_FUNCTIONS = Path(__file__).with_name("reward_functions.py")
USUAL_PROMPT = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]


def rows_of(truths, sources=None, prompts=None):
    """Return a table of data with these ground truths, data sources (x by default) and prompts."""
    return pandas.DataFrame(
        {
            "data_source": sources or ["x"] * len(truths),
            "prompt": prompts or [USUAL_PROMPT] * len(truths),
            "reward_model": [{"ground_truth": truth} for truth in truths],
        }
    )


@pytest.fixture
def try_reward(tmp_path, capsys):
    """Return a function that runs `check --try-reward --rows 2`, and returns its exit status and its output.

    There are three rows and a file with responses to two of them.
    """
    shutil.copy(REWARD_FUNCTIONS, tmp_path / "reward.py")
    (tmp_path / "responses.jsonl").write_text('"2"\n["ra", "raise"]\n')
    rows = rows_of(["1", "2", "3"], prompts=[[], [], []])
    rows.to_parquet(tmp_path / "train.parquet")
    usual_arguments = [
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        f"data.train_files={tmp_path}/train.parquet",
        f"reward.custom_reward_function.path={tmp_path}/reward.py",
        "--try-reward",
        "--rows=2",
    ]

    def run(*arguments, keys="correct,format", preset="gdpo"):
        reward_keys = [f"algorithm.rewards.keys=[{keys}]"] if keys else []
        status = main(["check", f"+verl_ext={preset}", *usual_arguments, *reward_keys, *arguments])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


@pytest.fixture
def save_rows(tmp_path):
    """Return a function that writes a table to a file of data, `train` or `val` for example."""

    def save(rows, name):
        rows.to_parquet(tmp_path / f"{name}.parquet", row_group_size=7)

    return save


@pytest.fixture
def try_rows(try_reward, save_rows, tmp_path):
    """Return a function as `try_reward`, for these rows of training data and the file val.parquet, if it exists."""

    def run(rows, *arguments):
        save_rows(rows, "train")
        return try_reward(f"data.val_files={tmp_path}/val.parquet", *arguments)

    return run
