"""`prepare_data.py` of each recipe, on small files with the columns of the published data sets."""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.facts import a_line_says, says
from tests.fresh import TIMEOUT
from tests.recipes.launchers import RECIPES
from verl_ext.rewards import boxed_math, gsm8k, tool_calling

CALL = '<think> t </think>\n<tool_call>\n{"name": "f", "parameters": {"a": 1, "b": [true, "x"]}}\n</tool_call>'
RESPONSE = "<think> t </think>\n<response> hello </response>"


def run(recipe, folder, *options):
    """The script as a user runs it in another folder, with that folder's `in` as the data set."""
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


def rows(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def write(path, records):
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


def gsm8k_clone(folder, train=GSM8K):
    write(folder / "in/main/train-00000-of-00001.parquet", train)
    write(folder / "in/main/test-00000-of-00001.parquet", GSM8K[:1])
    write(folder / "in/socratic/train-00000-of-00001.parquet", [{"question": "not", "answer": "read"}])


def rlla(truth, **changed):
    prompt = [{"role": "system", "content": "Tools:\n1. Name: f"}, {"role": "user", "content": "call f"}]
    extra = {"split": "train", "index": 0, "instruction": "i", "input": "u", "output": truth}
    made = {"data_source": "rlla", "prompt": prompt, "ability": "math", "extra_info": extra}
    return {**made, "reward_model": {"style": "rule", "ground_truth": truth}, **changed}


def toolrl_clone(folder, train, below="dataset/rlla_4k"):
    write(folder / "in" / below / "train.parquet", train)
    write(folder / "in" / below / "test.parquet", [rlla(RESPONSE)])


def problem(solution, level="Level 5"):
    return {"problem": "What is it?", "level": level, "type": "Algebra", "solution": solution}


def math_folder(folder, train):
    write(folder / "in/MATH-lighteval/data/train-00000-of-00001.parquet", train)
    half = {"problem": "Half of one?", "answer": r"\frac{1}{2}", "subject": "Algebra", "level": 2, "unique_id": "1"}
    write(folder / "in/MATH-500/test.jsonl", [half])


def truths(path):
    return [row["reward_model"]["ground_truth"] for row in rows(path)]


def test_gsm8k(tmp_path):
    gsm8k_clone(tmp_path)
    done = run("gsm8k", tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "data/gsm8k"
    train = rows(folder / "train.parquet")
    assert truths(folder / "train.parquet") == ["18", "1,000", "-5"]
    assert len(rows(folder / "test.parquet")) == 1
    assert train[1]["extra_info"] == {"split": "train", "index": 1}
    assert [message["role"] for message in train[0]["prompt"]] == ["system", "user"]
    assert train[0]["prompt"][1]["content"] == "Half of 36?"
    shown = train[0]["prompt"][0]["content"].partition(":\n")[2]  # the format in the prompt is the one that is rewarded
    assert gsm8k.compute_score("d", shown, "1")["format"] == 1
    for row in train:
        truth = row["reward_model"]["ground_truth"]
        answer = f"<think>t</think>\n<answer>{truth}</answer>"
        assert gsm8k.compute_score(row["data_source"], answer, truth, row["extra_info"])["score"] == 3


@pytest.mark.parametrize("below", ["", "dataset/rlla_4k"])
def test_tool_calling(tmp_path, below):
    toolrl_clone(tmp_path, [rlla(CALL), rlla(RESPONSE)], below)
    done = run("tool_calling", tmp_path)
    assert done.returncode == 0, done.stderr
    train = rows(tmp_path / "data/tool_calling/train.parquet")
    assert truths(tmp_path / "data/tool_calling/train.parquet") == [CALL, RESPONSE]
    assert train[0]["prompt"] == rlla(CALL)["prompt"]
    assert train[1]["extra_info"] == {"split": "train", "index": 1}
    for row, expected in zip(train, (4, 1), strict=True):
        truth = row["reward_model"]["ground_truth"]
        assert tool_calling.compute_score("rlla", truth, truth, row["extra_info"])["score"] == expected


def test_tool_calling_from_the_raw_file_makes_the_split_of_toolrl(tmp_path):
    records = [{"instruction": f"i{n}", "input": f" u{n}\n", "output": CALL} for n in range(160)]
    write(tmp_path / "in/dataset/rlla_4k_raw/rlla_rl.json", records)
    done = run("tool_calling", tmp_path, "--raw", "--local_save_dir", "out")
    assert done.returncode == 0, done.stderr
    # ToolRL's dataset/rlla_4k_raw/rlla.py: np.random.seed(31415), np.random.shuffle(dataset), 2 % for the test.
    shuffled = list(range(160))
    np.random.RandomState(31415).shuffle(shuffled)
    train, test = rows(tmp_path / "out/train.parquet"), rows(tmp_path / "out/test.parquet")
    assert [row["extra_info"]["index"] for row in train] == shuffled[:-3]
    assert [row["extra_info"]["index"] for row in test] == shuffled[-3:]
    assert [message["content"] for message in test[0]["prompt"]] == [f"i{shuffled[-3]}", f" u{shuffled[-3]}\n"]


def test_math(tmp_path):
    solutions = {
        r"first \boxed{3}, no: $\boxed{x^2+1}$.": "x^2+1",
        r"so $x = \boxed 12$.": "12",
        r"Hence $\fbox{6}$.": "6",
        r"It is $\boxed{0.\overline{72}}$.": r"0.\overline{72}",
    }
    math_folder(tmp_path, [*map(problem, solutions), problem(r"\boxed{5}", "Level ?")])
    done = run("math", tmp_path)
    assert done.returncode == 0, done.stderr
    train, test = rows(tmp_path / "data/math/train.parquet"), rows(tmp_path / "data/math/math500.parquet")
    assert truths(tmp_path / "data/math/train.parquet") == [*solutions.values(), "5"]
    assert [row["extra_info"]["level"] for row in train] == [5, 5, 5, 5, 0]
    assert test[0]["data_source"] == "HuggingFaceH4/MATH-500"
    assert boxed_math.compute_score("d", r"\boxed{0.5}", test[0]["reward_model"]["ground_truth"])["score"] == 1
    for solution, gold in solutions.items():
        assert boxed_math.compute_score("d", solution, gold)["score"] == 1


def test_math_levels_that_were_not_asked_for_are_left_out_and_counted(tmp_path):
    math_folder(tmp_path, [problem(rf"\boxed{{{n}}}", f"Level {n}") for n in (1, 2, 3, 4, 5)])
    done = run("math", tmp_path, "--levels", "3", "4", "5")
    assert a_line_says(done.stdout, "train.parquet", 3, 2)
    assert [row["extra_info"]["index"] for row in rows(tmp_path / "data/math/train.parquet")] == [2, 3, 4]
    assert len(rows(tmp_path / "data/math/math500.parquet")) == 1


# recipe, what writes the data set, index of a bad row in train to what is said of it; the other rows are good
BAD = {
    "gsm8k": (
        gsm8k_clone,
        [
            *GSM8K,
            {"question": "q", "answer": "no mark"},
            {"question": " ", "answer": "#### 3"},
            {"question": "q", "answer": "#### 1/2"},
        ],
        {3: ["'####'"], 4: ["'question'"], 5: ["'1/2'", "integer"]},
    ),
    "tool_calling": (
        toolrl_clone,
        [
            rlla(CALL),
            rlla(CALL.replace('{"name"', '{"nam"')),
            rlla("just text"),
            rlla(CALL, prompt=[{"role": "user", "content": ""}]),
        ],
        {1: ["tool call 1", "'name'"], 2: ["well-formed"], 3: ["role"]},
    ),
    "math": (
        math_folder,
        [
            problem("it is 3"),
            problem(r"\boxed{3"),
            problem(r"\boxed{3}", "hard"),
            problem(r"\boxed{3}"),
            problem(r"\boxed 5x+3"),
        ],
        {0: ["'solution'"], 1: [r"\boxed{...}"], 2: ["'hard'", "'Level 1'"], 4: [r"\boxed{...}"]},
    ),
}


@pytest.mark.parametrize("recipe", BAD)
def test_bad_rows_are_named_and_nothing_is_written_unless_they_are_left_out(recipe, tmp_path):
    make, train, reasons = BAD[recipe]
    make(tmp_path, train)
    done = run(recipe, tmp_path)
    assert done.returncode == 1
    assert says(done.stderr, f"{len(reasons)} of {len(train) + 1} rows", "--skip_bad_rows")
    for index, facts in reasons.items():
        assert a_line_says(done.stderr, f"train row {index}:", *facts)
    assert not (tmp_path / "data").exists()

    done = run(recipe, tmp_path, "--skip_bad_rows")
    assert done.returncode == 0, done.stderr
    good = [index for index in range(len(train)) if index not in reasons]
    written = rows(tmp_path / f"data/{recipe}/train.parquet")
    assert [row["extra_info"]["index"] for row in written] == good
    counts = json.loads((tmp_path / f"data/{recipe}/prepared.json").read_text())["splits"]["train"]
    assert (counts["read"], counts["written"], counts["bad"]) == (len(train), len(good), len(reasons))
    assert [each["index"] for each in counts["bad_rows"]] == list(reasons)
