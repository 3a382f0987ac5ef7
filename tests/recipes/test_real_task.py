"""The two real tasks of scripts/evidence: the splits of the data, examples, and numbers of the pages."""

import doctest
import importlib
import json
import re
import statistics
import subprocess
import sys
import zipfile
from itertools import chain

import pyarrow.parquet
import pytest

from recipes.common.data import parser, prepare
from tests.recipes.launchers import RECIPES
from verl_ext.rewards.tool_calling import check_ground_truth

SCRIPTS = RECIPES.parent / "scripts/evidence"
RESULTS = RECIPES.parent / "docs/pages/results.md"
sys.path.insert(0, str(SCRIPTS))
MODULES = {name: importlib.import_module(name) for name in ("real.cold_start", "real.data", "real.tools", "real_tools")}
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


def mean_of_first_steps(config, seed, key):
    """Return the mean of a reward over the first 15 steps of a stored run on a GPU."""
    lines = (SCRIPTS / f"h200/{config}-{seed}.jsonl").read_text().splitlines()
    return statistics.mean(json.loads(line)["data"][f"reward/{key}/mean"] for line in lines[:15])


@pytest.mark.parametrize(
    ("key", "sentence"),
    [("format", "by 0.117 to 0.242"), ("correctness", "by -0.067 to +0.008")],
)
def test_pages_have_the_differences_of_the_stored_runs_on_a_gpu(key, sentence):
    for path in (SCRIPTS / "gpu_h200.md", RESULTS):
        assert sentence in path.read_text().replace("\n", " ")
    smallest, largest = [float(number) for number in re.findall(r"[-+]?\d+\.\d+", sentence)]
    differences = []
    for seed in (1, 2, 4):
        differences.append(mean_of_first_steps("gdpo", seed, key) - mean_of_first_steps("grpo", seed, key))
    assert min(differences) == pytest.approx(smallest, abs=5e-4)
    assert max(differences) == pytest.approx(largest, abs=5e-4)
