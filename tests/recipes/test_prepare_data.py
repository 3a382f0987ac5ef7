"""`prepare_data.py` of each recipe, on small files with the columns of the published data sets."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.facts import a_line_says, says
from tests.fresh import TIMEOUT
from tests.recipes.launchers import RECIPES
from verl_ext.rewards import boxed_math, gsm8k, tool_calling

CALL = '<think> t </think>\n<tool_call>\n{"name": "f", "parameters": {"a": 1, "b": [true, "x"]}}\n</tool_call>'
TEXT_ONLY = "<think> t </think>\n<response> hello </response>"


def prepare(recipe, folder, *options):
    """Run the script of a recipe as a user does in another folder, whose subfolder `in` has the data set."""
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, str(RECIPES / recipe / "prepare_data.py"), "--local_dataset_path", "in", *options],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def prepare_successfully(recipe, folder, *options):
    """Run the script of a recipe, which must succeed, and return its output."""
    done = prepare(recipe, folder, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def indexes(path):
    """Return the positions of the rows of a prepared file in the original data set."""
    return [row["extra_info"]["index"] for row in rows(path)]


def ground_truths(path):
    return [row["reward_model"]["ground_truth"] for row in rows(path)]


def write(path, records):
    """Write records in the format of the file's ending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        path.write_text(json.dumps(records))


GSM8K = [
    {"question": "Half of 36?", "answer": "36/2 = <<36/2=18>>18\n#### 18"},
    {"question": "A thousand?", "answer": "It is said.\n#### 1,000"},
    {"question": "Five less than 0?", "answer": "0-5 = -5\n#### -5"},
]


def write_gsm8k(folder, train=GSM8K):
    """Write a clone of GSM8K. The folder `socratic` is not read."""
    write(folder / "in/main/train-00000-of-00001.parquet", train)
    write(folder / "in/main/test-00000-of-00001.parquet", GSM8K[:1])
    write(folder / "in/socratic/train-00000-of-00001.parquet", [{"question": "not", "answer": "read"}])


def toolrl_record(truth, **changes):
    """Return a record of ToolRL's data set with this ground truth."""
    record = {
        "data_source": "rlla",
        "prompt": [{"role": "system", "content": "Tools:\n1. Name: f"}, {"role": "user", "content": "call f"}],
        "ability": "math",
        "extra_info": {"split": "train", "index": 0, "instruction": "i", "input": "u", "output": truth},
        "reward_model": {"style": "rule", "ground_truth": truth},
    }
    return {**record, **changes}


def write_toolrl(folder, train, subfolder="dataset/rlla_4k"):
    """Write a clone of ToolRL's repository."""
    write(folder / "in" / subfolder / "train.parquet", train)
    write(folder / "in" / subfolder / "test.parquet", [toolrl_record(TEXT_ONLY)])


def math_record(solution, level="Level 5"):
    """Return a record of MATH with this solution."""
    return {"problem": "What is it?", "level": level, "type": "Algebra", "solution": solution}


def write_math(folder, train):
    """Write clones of MATH and MATH-500."""
    write(folder / "in/MATH-lighteval/data/train-00000-of-00001.parquet", train)
    half = {"problem": "Half of one?", "answer": r"\frac{1}{2}", "subject": "Algebra", "level": 2, "unique_id": "1"}
    write(folder / "in/MATH-500/test.jsonl", [half])


def test_gsm8k_has_a_prompt_and_a_ground_truth_for_each_question(tmp_path):
    write_gsm8k(tmp_path)
    prepare_successfully("gsm8k", tmp_path)
    folder = tmp_path / "data/gsm8k"
    assert ground_truths(folder / "train.parquet") == ["18", "1,000", "-5"]
    assert len(rows(folder / "test.parquet")) == 1
    first, second, _ = rows(folder / "train.parquet")
    assert second["extra_info"] == {"split": "train", "index": 1}
    system, user = first["prompt"]
    assert system["role"] == "system"
    assert user == {"role": "user", "content": "Half of 36?"}
    # The format of the system message is the one that is rewarded.
    format_of_prompt = system["content"].partition(":\n")[2]
    assert gsm8k.compute_score("d", format_of_prompt, "1")["format"] == 1


def test_gsm8k_rewards_its_ground_truths(tmp_path):
    write_gsm8k(tmp_path)
    prepare_successfully("gsm8k", tmp_path)
    for row in rows(tmp_path / "data/gsm8k/train.parquet"):
        truth = row["reward_model"]["ground_truth"]
        response = f"<think>t</think>\n<answer>{truth}</answer>"
        rewards = gsm8k.compute_score(row["data_source"], response, truth, row["extra_info"])
        assert rewards["score"] == 3


@pytest.mark.parametrize("subfolder", ["", "dataset/rlla_4k"])
def test_tool_calling_rewards_its_ground_truths(tmp_path, subfolder):
    write_toolrl(tmp_path, [toolrl_record(CALL), toolrl_record(TEXT_ONLY)], subfolder)
    prepare_successfully("tool_calling", tmp_path)
    call, text = rows(tmp_path / "data/tool_calling/train.parquet")
    assert call["prompt"] == toolrl_record(CALL)["prompt"]
    assert text["extra_info"] == {"split": "train", "index": 1}
    for row, truth, score in ((call, CALL, 4), (text, TEXT_ONLY, 1)):
        assert row["reward_model"]["ground_truth"] == truth
        assert tool_calling.compute_score("rlla", truth, truth, row["extra_info"])["score"] == score


def test_raw_file_of_tool_calling_has_the_split_of_toolrl(tmp_path):
    records = [{"instruction": f"i{n}", "input": f" u{n}\n", "output": CALL} for n in range(160)]
    write(tmp_path / "in/dataset/rlla_4k_raw/rlla_rl.json", records)
    prepare_successfully("tool_calling", tmp_path, "--raw", "--local_save_dir", "out")
    # ToolRL's dataset/rlla_4k_raw/rlla.py: np.random.seed(31415), np.random.shuffle(dataset), 2 % for the test.
    shuffled = list(range(160))
    np.random.RandomState(31415).shuffle(shuffled)
    expected_train, expected_test = shuffled[:-3], shuffled[-3:]
    assert indexes(tmp_path / "out/train.parquet") == expected_train
    assert indexes(tmp_path / "out/test.parquet") == expected_test
    first = rows(tmp_path / "out/test.parquet")[0]
    number = expected_test[0]
    assert [message["content"] for message in first["prompt"]] == [f"i{number}", f" u{number}\n"]


# Solutions of MATH, each with the ground truth.
SOLUTIONS = {
    r"first \boxed{3}, no: $\boxed{x^2+1}$.": "x^2+1",
    r"so $x = \boxed 12$.": "12",
    r"Hence $\fbox{6}$.": "6",
    r"It is $\boxed{0.\overline{72}}$.": r"0.\overline{72}",
}


def test_math_takes_the_last_box_of_a_solution(tmp_path):
    records = [math_record(solution) for solution in SOLUTIONS]
    write_math(tmp_path, [*records, math_record(r"\boxed{5}", "Level ?")])
    prepare_successfully("math", tmp_path)
    train = tmp_path / "data/math/train.parquet"
    assert ground_truths(train) == [*SOLUTIONS.values(), "5"]
    assert [row["extra_info"]["level"] for row in rows(train)] == [5, 5, 5, 5, 0]


def test_ground_truth_of_math500_is_rewarded(tmp_path):
    write_math(tmp_path, [math_record(r"\boxed{5}")])
    prepare_successfully("math", tmp_path)
    (row,) = rows(tmp_path / "data/math/math500.parquet")
    assert row["data_source"] == "HuggingFaceH4/MATH-500"
    truth = row["reward_model"]["ground_truth"]
    assert boxed_math.compute_score("d", r"\boxed{0.5}", truth)["score"] == 1


@pytest.mark.parametrize(("solution", "truth"), SOLUTIONS.items())
def test_solution_of_math_is_a_rewarded_response(solution, truth):
    assert boxed_math.compute_score("d", solution, truth)["score"] == 1


def test_other_levels_of_math_are_left_out_and_counted(tmp_path):
    write_math(tmp_path, [math_record(rf"\boxed{{{level}}}", f"Level {level}") for level in (1, 2, 3, 4, 5)])
    output = prepare_successfully("math", tmp_path, "--levels", "3", "4", "5")
    assert a_line_says(output, "train.parquet", 3, 2)
    assert indexes(tmp_path / "data/math/train.parquet") == [2, 3, 4]
    assert len(rows(tmp_path / "data/math/math500.parquet")) == 1


@dataclass(frozen=True)
class InvalidData:
    """A data set with invalid rows of training: their positions, each with facts of the message."""

    write: Callable[[Path, list[dict]], None]
    train: list[dict]
    invalid_rows: dict[int, list[str]]

    @property
    def valid_rows(self):
        return [index for index in range(len(self.train)) if index not in self.invalid_rows]


INVALID_DATA = {
    "gsm8k": InvalidData(
        write_gsm8k,
        [
            *GSM8K,
            {"question": "q", "answer": "no mark"},
            {"question": " ", "answer": "#### 3"},
            {"question": "q", "answer": "#### 1/2"},
        ],
        {3: ["'####'"], 4: ["'question'"], 5: ["'1/2'", "integer"]},
    ),
    "tool_calling": InvalidData(
        write_toolrl,
        [
            toolrl_record(CALL),
            toolrl_record(CALL.replace('{"name"', '{"nam"')),
            toolrl_record("just text"),
            toolrl_record(CALL, prompt=[{"role": "user", "content": ""}]),
        ],
        {1: ["tool call 1", "'name'"], 2: ["well-formed"], 3: ["role"]},
    ),
    "math": InvalidData(
        write_math,
        [
            math_record("it is 3"),
            math_record(r"\boxed{3"),
            math_record(r"\boxed{3}", "hard"),
            math_record(r"\boxed{3}"),
            math_record(r"\boxed 5x+3"),
        ],
        {0: ["'solution'"], 1: [r"\boxed{...}"], 2: ["'hard'", "'Level 1'"], 4: [r"\boxed{...}"]},
    ),
}


@pytest.mark.parametrize("recipe", INVALID_DATA)
def test_invalid_rows_are_an_error_that_names_them(recipe, tmp_path):
    data = INVALID_DATA[recipe]
    data.write(tmp_path, data.train)
    done = prepare(recipe, tmp_path)
    assert done.returncode == 1
    row_count = len(data.train) + 1  # and the one row of the test set
    assert says(done.stderr, f"{len(data.invalid_rows)} of {row_count} rows", "--skip_bad_rows")
    for index, facts in data.invalid_rows.items():
        assert a_line_says(done.stderr, f"train row {index}:", *facts)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("recipe", INVALID_DATA)
def test_skipped_invalid_rows_are_counted(recipe, tmp_path):
    data = INVALID_DATA[recipe]
    data.write(tmp_path, data.train)
    prepare_successfully(recipe, tmp_path, "--skip_bad_rows")
    folder = tmp_path / "data" / recipe
    assert indexes(folder / "train.parquet") == data.valid_rows
    counts = json.loads((folder / "prepared.json").read_text())["splits"]["train"]
    assert counts["read"] == len(data.train)
    assert counts["written"] == len(data.valid_rows)
    assert counts["bad"] == len(data.invalid_rows)
    assert [row["index"] for row in counts["bad_rows"]] == list(data.invalid_rows)
