"""The two real tasks of scripts/evidence: the splits of the data, examples, and numbers of the pages."""

import doctest
import importlib
import json
import re
import subprocess
import sys
import zipfile
from itertools import chain

import pyarrow.parquet
import pytest

from recipes.common.data import parser, prepare
from tests.recipes.launchers import RECIPES, environment
from verl_ext.cli import main
from verl_ext.rewards.tool_calling import check_ground_truth

SCRIPTS = RECIPES.parent / "scripts/evidence"
RESULTS = RECIPES.parent / "docs/pages/results.md"
sys.path.insert(0, str(SCRIPTS))
NAMES = ("real.cold_start", "real.data", "real.tools", "real_tools", "paired_runs")
MODULES = {name: importlib.import_module(name) for name in NAMES}
sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_examples_of_the_docstrings_are_correct(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def questions(path):
    """Return the questions of a data file in their order."""
    rows = pyarrow.parquet.read_table(path).to_pylist()
    return [row["prompt"][-1]["content"] for row in rows]


def gsm8k_records(name, count):
    """Return records like those of GSM8K, with the question `NAME NUMBER?`."""
    return [{"question": f"{name} {number}?", "answer": f"It is {number}.\n#### {number:,}"} for number in range(count)]


def write_lines(path, records):
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_questions_of_the_cold_start_are_not_in_validation_or_rl(tmp_path):
    write_lines(tmp_path / "train.jsonl", gsm8k_records("train", 1010))
    write_lines(tmp_path / "test.jsonl", gsm8k_records("test", 7))
    output = tmp_path / "prepared"
    plan = MODULES["real.data"].plan(cold_start=1005, val=2, quick=3)
    options = ["--local_dataset_path", str(tmp_path), "--local_save_dir", str(output)]
    prepare(plan, parser(None, "unused").parse_args(options))

    expected = [f"train {number}?" for number in range(1010)]
    assert questions(output / "cold_start.parquet") == expected[:1005]
    assert questions(output / "val.parquet") == expected[1005:1007]
    assert questions(output / "train.parquet") == expected[1007:]
    assert questions(output / "test.parquet") == [f"test {number}?" for number in range(7)]


ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "dict", "properties": {"a": {}, "b": {}}}}
QUESTION_COUNT = 20
ASKED_NUMBERS = {"simple": range(QUESTION_COUNT), "multiple": range(0, QUESTION_COUNT, 10)}
"""The numbers of the questions in each category. Every tenth question is asked twice."""


def bfcl_question(category, number):
    """Return a question of BFCL and its accepted values."""
    name = f"{category}_{number}"
    message = {"role": "user", "content": f"Add {number} and 1"}
    accepted_values = {"add": {"a": [number, str(number)], "b": [1], "unit": ["", "m"]}}
    question = {"id": name, "question": [[message]], "function": [ADD]}
    return question, {"id": name, "ground_truth": [accepted_values]}


def write_wheel(path):
    """Write a wheel like that of bfcl-eval, with questions about one synthetic tool."""
    with zipfile.ZipFile(path, "w") as archive:
        for category in MODULES["real.tools"].CATEGORIES:
            pairs = [bfcl_question(category, number) for number in ASKED_NUMBERS.get(category, ())]
            questions_of_category = "\n".join(json.dumps(question) for question, _ in pairs)
            answers = "\n".join(json.dumps(answer) for _, answer in pairs)
            archive.writestr(f"bfcl_eval/data/BFCL_v3_{category}.json", questions_of_category)
            archive.writestr(f"bfcl_eval/data/possible_answer/BFCL_v3_{category}.json", answers)
    return path


SPLIT_SIZES = {"test": 4, "cold_start": 8, "val": 2}


@pytest.fixture
def splits_of_tools(tmp_path):
    """Return the rows of each split of the questions about tools."""
    tools = MODULES["real.tools"]
    usable = tools.usable(tools.read(write_wheel(tmp_path / "bfcl_eval.whl")), lambda _: (9, 9))
    return tools.splits(usable, "mixed", SPLIT_SIZES)


def number_of_question(row):
    """Return the number of a row whose question is `Add NUMBER and 1`."""
    question = row["prompt"][-1]["content"]
    return int(question.split()[1])


def test_every_question_of_tools_is_in_one_split_only(splits_of_tools):
    sizes = {name: len(rows) for name, rows in splits_of_tools.items()}
    assert sizes == {**SPLIT_SIZES, "train": 6}
    numbers = [number_of_question(row) for row in chain(*splits_of_tools.values())]
    assert sorted(numbers) == list(range(QUESTION_COUNT))


def test_ground_truth_of_tools_has_the_first_accepted_values(splits_of_tools):
    for row in chain(*splits_of_tools.values()):
        (call,) = check_ground_truth(row["reward_model"]["ground_truth"]).calls
        assert call == {"name": "add", "parameters": {"a": number_of_question(row), "b": 1}}


@pytest.fixture(scope="module")
def table_of_differences():
    """Return the table of the differences between the stored runs."""
    command = [sys.executable, str(SCRIPTS / "real_tools.py"), "table"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    _, differences, _ = printed.split("\n\n")
    return differences


def test_page_has_the_table_of_the_stored_runs(table_of_differences):
    assert table_of_differences in (SCRIPTS / "tool_calling.md").read_text()


def test_results_page_has_the_intervals_of_the_stored_runs(table_of_differences):
    number = r"([-+]\d\.\d+)"
    intervals = re.findall(rf"{number} \({number} to {number}\)", RESULTS.read_text())
    assert len(intervals) == 6
    for mean, low, high in intervals:
        assert f"{mean} [{low}, {high}]" in table_of_differences


def differences_on_a_gpu(steps):
    """Return the seeds of the pairs of stored runs on a GPU, and the differences by reward."""
    paired_runs = MODULES["paired_runs"]
    one, _ = paired_runs.complete_runs(SCRIPTS / "h200", "gdpo", 1, steps)
    other, _ = paired_runs.complete_runs(SCRIPTS / "h200", "grpo", 1, steps)
    return paired_runs.differences(one, other)


@pytest.mark.parametrize(
    ("key", "sentence"),
    [("format", "by 0.117 to 0.242"), ("correctness", "by -0.067 to +0.008")],
)
def test_pages_have_the_differences_of_the_stored_runs_on_a_gpu(key, sentence):
    for path in (SCRIPTS / "gpu_h200.md", RESULTS):
        assert sentence in path.read_text().replace("\n", " ")
    smallest, largest = [float(number) for number in re.findall(r"[-+]?\d+\.\d+", sentence)]
    seeds, differences = differences_on_a_gpu(15)
    assert seeds == [1, 2, 4]
    assert min(differences[key]) == pytest.approx(smallest, abs=5e-4)
    assert max(differences[key]) == pytest.approx(largest, abs=5e-4)


def print_differences(*arguments):
    """Return the exit status, the output and the errors of `paired_runs.py`."""
    command = [sys.executable, str(SCRIPTS / "paired_runs.py"), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout, ended.stderr


def notes_in(printed):
    """Return the first word of each note: the run, the seed's word, or the metric."""
    return [line.split()[1] for line in printed.splitlines() if line.startswith("note: ")]


def test_runs_without_all_steps_and_seeds_without_a_pair_are_named():
    """Only gdpo logs the reward `score`."""
    status, printed, _ = print_differences(SCRIPTS / "h200", "gdpo", "grpo", "--steps", 1, 16)
    assert status == 0
    incomplete = ["gdpo-1.jsonl", "gdpo-2.jsonl", "gdpo-3.jsonl", "grpo-1.jsonl", "grpo-2.jsonl"]
    assert notes_in(printed) == [*incomplete, "score"]
    _, printed, _ = print_differences(SCRIPTS / "h200", "gdpo", "grpo", "--steps", 1, 13)
    assert notes_in(printed) == ["Seed", "score"]
    assert "Seed 3 " in printed


def write_run(folder, name, rewards, validation=()):
    """Write the log of a run with one reward at each step, and metrics of the validation at the last step."""
    lines = [{"step": step, "data": {"reward/format/mean": value}} for step, value in enumerate(rewards, start=1)]
    lines[-1]["data"] |= dict(validation)
    (folder / name).mkdir()
    write_lines(folder / name / "metrics.jsonl", lines)


GREEDY = "val-aux/tools/format/mean@1"


def test_reward_is_averaged_and_validation_is_that_of_the_last_step(tmp_path):
    write_run(tmp_path, "gdpo-1", [0.0, 0.5, 1.0], {GREEDY: 0.75})
    write_run(tmp_path, "grpo-1", [0.0, 0.25, 0.25], {GREEDY: 0.5})
    complete, _ = MODULES["paired_runs"].complete_runs(tmp_path, "gdpo", 2, 3)
    assert complete == {1: {"format": 0.75, GREEDY: 0.75}}
    status, printed, _ = print_differences(tmp_path, "gdpo", "grpo", "--steps", 2, 3)
    assert status == 0
    assert "| format | +0.500 |" in printed
    assert f"| {GREEDY} | +0.250 |" in printed


def test_metric_that_a_run_lacks_is_named_and_left_out(tmp_path):
    write_run(tmp_path, "gdpo-1", [1.0], {GREEDY: 0.75})
    write_run(tmp_path, "grpo-1", [0.5])
    _, printed, _ = print_differences(tmp_path, "gdpo", "grpo", "--steps", 1, 1)
    assert notes_in(printed) == [GREEDY]
    assert "| format | +0.500 |" in printed


def test_step_without_a_reward_makes_a_run_incomplete(tmp_path):
    write_run(tmp_path, "gdpo-1", [1.0, None, 1.0])
    complete, [note] = MODULES["paired_runs"].complete_runs(tmp_path, "gdpo", 1, 3)
    assert complete == {}
    assert "gdpo-1" in note


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("missing", "gdpo", "grpo"), 2),
        (("runs", "gdpo", "grpo", "--steps", "3", "1"), 2),
        (("runs", "gdpo", "grpo-clean"), 1),
        (("runs", "gdpo", "grpo"), 1),
        (("runs", "twice", "gdpo"), 1),
    ],
    ids=["no folder", "steps reversed", "no such config", "no common seed", "two runs of a seed"],
)
def test_mistake_is_an_error(arguments, status, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    for name in ("gdpo-1", "grpo-2", "twice-1", "twice-01"):
        write_run(runs, name, [1.0] * 30)
    found, _, errors = print_differences(tmp_path / arguments[0], *arguments[1:])
    assert found == status
    assert "Traceback" not in errors


def test_pairs_of_the_stored_runs_have_the_intervals_of_the_page(tmp_path, table_of_differences):
    """The metrics that verl logged are those of the stored responses."""
    for seed in range(5, 13):
        for config in ("gdpo", "grpo"):
            MODULES["real_tools"].extract(f"eight-{config}-{seed}", tmp_path / f"{config}-{seed}")
    _, printed, _ = print_differences(tmp_path, "gdpo", "grpo", "--steps", 1, 30)
    intervals = re.findall(r"[-+]\d\.\d+ \[[^]]+\]", printed)
    assert len(intervals) == 2
    for interval in intervals:
        assert interval in table_of_differences


@pytest.mark.parametrize("config", ["gdpo", "grpo-clean"])
def test_training_on_a_gpu_passes_the_check(config, tmp_path):
    """A program in the place of Python records the arguments of verl."""
    recorder = tmp_path / "python"
    recorder.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    recorder.chmod(0o755)
    variables = environment(PYTHON=str(recorder), TASK_DIR=str(tmp_path), OUTPUT_DIR=str(tmp_path / "run"))
    command = [str(SCRIPTS / "train_on_gpu.sh"), config, "21", "actor_rollout_ref.rollout.enforce_eager=False"]
    printed = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
    _, arguments = printed.split("verl.trainer.main_ppo\n")
    assert main(["check", *arguments.splitlines()]) == 0
