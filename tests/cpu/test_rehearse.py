"""The command `rehearse`, except for the runs of verl that it starts."""

import json
import shutil
import subprocess
import sys
import time
from collections import Counter

import pandas
import pytest
from omegaconf import OmegaConf

from tests.facts import facts, says
from verl_ext.checks.samples import sample
from verl_ext.cli import main
from verl_ext.cpu import rehearse
from verl_ext.cpu.rehearse import MARKER, empty_and_lock, run_verl
from verl_ext.cpu.report import ERROR, NOTE, OK
from verl_ext.errors import ConfigurationError


def test_a_variable_of_the_run_may_be_a_number(tmp_path, monkeypatch):
    variables = {"runtime_env": {"env_vars": {"NCCL_NVLS_ENABLE": 0}}}
    config = OmegaConf.create({"trainer": {}, "ray_kwargs": {"ray_init": variables}})
    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    assert run_verl(tmp_path / "run", config, time.monotonic() + 60).status == 0


RECORD_CALLS = """
import json
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with Path(__file__).with_name("calls.jsonl").open("a") as file:
        print(json.dumps([data_source, int(ground_truth), solution_str]), file=file)
    return {"score": float(solution_str == ground_truth)}
"""
SOURCES = ["x", "y", "z"]


@pytest.fixture
def train_file(tmp_path):
    """Training data of three sources that alternate; the ground truth of a row is its number."""
    rows = []
    for number in range(300):
        ground_truth = {"ground_truth": str(number)}
        prompt = [{"role": "user", "content": "a"}]
        rows.append({"data_source": SOURCES[number % 3], "prompt": prompt, "reward_model": ground_truth})
    pandas.DataFrame(rows).to_parquet(tmp_path / "train.parquet", row_group_size=70)
    return tmp_path / "train.parquet"


@pytest.mark.parametrize("count", [3, 10, 100, 150, 300, 1000])
def test_a_sample_has_equally_many_rows_of_each_data_source(train_file, count):
    config = OmegaConf.create({"data": {"train_files": str(train_file), "prompt_key": "prompt"}})
    rows = sample(config, "data.train_files", count).rows
    assert rows == sample(config, "data.train_files", count).rows  # the seed is fixed
    assert len(rows) == min(count, 300)
    rows_by_source = Counter(row["data_source"] for row in rows.values())
    assert set(rows_by_source) == set(SOURCES)
    assert max(rows_by_source.values()) - min(rows_by_source.values()) <= 1


@pytest.fixture
def recorded_calls(train_file, tmp_path, monkeypatch):
    """Return a function that rehearses up to the first run, and returns the calls of the reward function.

    A call has the data source, the number of the row and the response.
    """

    def run(*options):
        monkeypatch.setattr(rehearse, "run_stages", lambda options, deadline: [])
        (tmp_path / "reward.py").write_text(RECORD_CALLS)
        status = main(
            [
                "rehearse",
                "+verl_ext=drgrpo",
                "actor_rollout_ref.rollout.n=8",
                "actor_rollout_ref.actor.use_dynamic_bsz=True",
                f"data.train_files={train_file}",
                f"reward.custom_reward_function.path={tmp_path}/reward.py",
                *("--rows", "6", *options),
            ]
        )
        assert status == 0
        return [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]

    return run


def test_the_reward_function_is_tried_on_rows_of_each_data_source(recorded_calls):
    calls = recorded_calls()
    assert {source for source, _, _ in calls} == set(SOURCES)
    assert len({number for _, number, _ in calls}) == 6


def test_given_responses_are_scored_with_the_first_rows(recorded_calls, tmp_path):
    file = tmp_path / "responses.jsonl"
    file.write_text("".join(f'"given {number}"\n' for number in range(6)))
    calls = recorded_calls("--responses", str(file))
    assert {source for source, _, _ in calls} == set(SOURCES)
    assert {number for _, number, _ in calls} == set(range(6))
    calls_with_given = {(number, response) for _, number, response in calls if response.startswith("given")}
    assert calls_with_given == {(number, f"given {number}") for number in range(6)}


def test_the_time_limit_covers_the_trial_of_the_reward_and_both_runs(monkeypatch):
    deadlines = []
    monkeypatch.setattr(rehearse, "check", lambda options, deadline: deadlines.append(deadline))
    monkeypatch.setattr(rehearse, "run_stages", lambda options, deadline: deadlines.append(deadline) or [])
    assert main(["rehearse", "--minutes", "2"]) == 0
    deadline_of_check, deadline_of_runs = deadlines
    assert deadline_of_check == deadline_of_runs < time.monotonic() + 120


@pytest.mark.parametrize(
    ("lines", "status", "result"),
    [
        ([("data", OK, "a"), ("tools", NOTE, "b"), ("groups", NOTE, "c")], 0, "passed"),
        ([("data", OK, "a"), ("tools", NOTE, "b"), ("groups", NOTE, "c"), ("save", ERROR, "d")], 1, "failed"),
    ],
)
def test_each_line_begins_with_its_state_and_the_last_counts_the_notes(lines, status, result, monkeypatch, capsys):
    monkeypatch.setattr(rehearse, "check", lambda options, deadline: 0)
    monkeypatch.setattr(rehearse, "run_stages", lambda options, deadline: lines)
    assert main(["rehearse"]) == status
    *printed_lines, last_line = capsys.readouterr().out.splitlines()
    for printed, (stage, state, text) in zip(printed_lines, lines, strict=True):
        assert printed.split(maxsplit=2) == [state, f"{stage}:", text]
    assert says(last_line, result, "2")


def test_the_folder_of_the_last_rehearsal_is_emptied(tmp_path):
    with empty_and_lock(tmp_path / "rehearsal"):
        (tmp_path / "rehearsal/train").mkdir()
    (tmp_path / "rehearsal/notes.txt").touch()
    with empty_and_lock(tmp_path / "rehearsal"):
        names = {path.name for path in (tmp_path / "rehearsal").iterdir()}
    assert names == {MARKER, "notes.txt"}


def test_a_folder_that_no_rehearsal_created_is_rejected_and_kept(tmp_path):
    (tmp_path / "mine/train").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=facts("trainer.default_local_dir", tmp_path / "mine")):
        empty_and_lock(tmp_path / "mine")
    assert (tmp_path / "mine/train").exists()


def test_a_folder_that_cannot_be_written_is_rejected(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file/rehearsal"
    with pytest.raises(ConfigurationError, match=facts("trainer.default_local_dir", folder)):
        empty_and_lock(folder)


LOCK_AND_WAIT = """
import pathlib, sys
from verl_ext.cpu.rehearse import empty_and_lock
lock = empty_and_lock(pathlib.Path(sys.argv[1]))
print(flush=True)
input()
"""


def test_a_second_rehearsal_is_rejected_and_a_killed_one_leaves_no_lock(tmp_path):
    command = [sys.executable, "-c", LOCK_AND_WAIT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        first.stdout.readline()
        (tmp_path / "train").mkdir()
        with pytest.raises(ConfigurationError, match=facts("trainer.default_local_dir", tmp_path)):
            empty_and_lock(tmp_path)
        assert (tmp_path / "train").exists()
        first.kill()
    empty_and_lock(tmp_path).close()
    assert not (tmp_path / "train").exists()
