"""`prepare_data.py` of every recipe, on small files with the columns of the published data sets."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.recipes import hub
from tests.recipes.launchers import RECIPES
from verl_ext.recipes.data import command
from verl_ext.rewards import boxed_math, gsm8k, tool_calling

CALL = '<think> t </think>\n<tool_call>\n{"name": "f", "parameters": {"a": 1, "b": [true, "x"]}}\n</tool_call>'
RESPONSE = "<think> t </think>\n<response> hello </response>"


def script(recipe: str) -> ModuleType:
    path = RECIPES / recipe / "prepare_data.py"
    spec = importlib.util.spec_from_file_location(f"prepare_{recipe}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(recipe: str, source: Path | None, target: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The script as a user runs it."""
    where = ["--local_dataset_path", str(source)] if source else []
    return subprocess.run(
        [sys.executable, str(RECIPES / recipe / "prepare_data.py"), *where, "--local_save_dir", str(target), *options],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def prepare(recipe: str, source: Path, target: Path, *options: str, plan: Any = None) -> str:
    """The same in this process: the printed text, or the error."""
    module = script(recipe)
    parser = command.parser(None, "unused")
    given = parser.parse_args(["--local_dataset_path", str(source), "--local_save_dir", str(target), *options])
    return command.prepare(plan or module.PLAN, given)


def rows(path: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(path).to_pylist()


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        path.write_text(json.dumps(records))


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "prepared.json").read_text())


# GSM8K: columns question and answer; main/<split>-00000-of-00001.parquet
GSM8K = [
    {"question": "Half of 36?", "answer": "36/2 = <<36/2=18>>18\n#### 18"},
    {"question": "A thousand?", "answer": "It is said.\n#### 1,000"},
    {"question": "Five less than 0?", "answer": "0-5 = -5\n#### -5"},
]


def gsm8k_clone(folder: Path, train: list[dict[str, Any]] = GSM8K) -> Path:
    write(folder / "main/train-00000-of-00001.parquet", train)
    write(folder / "main/test-00000-of-00001.parquet", GSM8K[:1])
    write(folder / "socratic/train-00000-of-00001.parquet", [{"question": "not", "answer": "read"}])
    return folder


def test_gsm8k_from_a_clone(tmp_path: Path) -> None:
    text = prepare("gsm8k", gsm8k_clone(tmp_path / "clone"), tmp_path / "out")
    assert "train.parquet: 3 rows" in text
    train = rows(tmp_path / "out/train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in train] == ["18", "1,000", "-5"]
    assert train[1]["extra_info"] == {"split": "train", "index": 1}
    assert train[1]["data_source"] == "openai/gsm8k"
    assert train[1]["reward_model"]["style"] == "rule"
    assert [message["role"] for message in train[0]["prompt"]] == ["system", "user"]
    assert train[0]["prompt"][1]["content"] == "Half of 36?"
    assert len(rows(tmp_path / "out/test.parquet")) == 1
    for row in train:
        truth = row["reward_model"]["ground_truth"]
        answer = f"<think>t</think>\n<answer>{truth}</answer>"
        assert gsm8k.compute_score("d", answer, truth, row["extra_info"])["score"] == 3


def test_the_answer_format_in_the_prompt_is_the_one_that_is_rewarded() -> None:
    shown = script("gsm8k").SYSTEM.partition(":\n")[2]
    assert gsm8k.compute_score("d", shown, "1")["format"] == 1


def test_gsm8k_bad_rows_are_named_with_their_reasons_and_nothing_is_written(tmp_path: Path) -> None:
    bad = [
        *GSM8K,
        {"question": "q", "answer": "no mark"},
        {"question": " ", "answer": "#### 3"},
        {"question": "q", "answer": "#### 1/2"},
        {"question": "q", "answer": None},
    ]
    done = run("gsm8k", gsm8k_clone(tmp_path / "clone", bad), tmp_path / "out")
    assert done.returncode == 1
    assert "4 of 8 rows" in done.stderr
    assert "train row 3: 'answer' has no '####'" in done.stderr
    assert "train row 4: 'question' is empty or not a string" in done.stderr
    assert "train row 5: row 5 of 'openai/gsm8k': the ground truth has the answer '1/2', not an integer" in done.stderr
    assert "train row 6: 'answer' is empty or not a string, found 'None'" in done.stderr
    assert "--skip_bad_rows" in done.stderr
    assert not (tmp_path / "out").exists()


def test_bad_rows_are_left_out_where_that_is_asked_for_counted_and_listed(tmp_path: Path) -> None:
    bad = [{"question": "q", "answer": "no mark"}, *GSM8K]
    done = run("gsm8k", gsm8k_clone(tmp_path / "clone", bad), tmp_path / "out", "--skip_bad_rows")
    assert done.returncode == 0, done.stderr
    assert " 1 bad rows" in done.stdout
    assert "train row 0: 'answer' has no '####'" in done.stdout
    assert [row["extra_info"]["index"] for row in rows(tmp_path / "out/train.parquet")] == [1, 2, 3]
    counts = report(tmp_path / "out")["splits"]["train"]
    assert (counts["read"], counts["written"], counts["bad"]) == (4, 3, 1)
    assert counts["bad_rows"][0]["index"] == 0
    assert "GSM8K train: 100%" in done.stderr  # the progress bar


def test_a_split_of_bad_rows_alone_is_an_error(tmp_path: Path) -> None:
    clone = gsm8k_clone(tmp_path / "clone", [{"question": "q", "answer": "no mark"}])
    done = run("gsm8k", clone, tmp_path / "out", "--skip_bad_rows")
    assert done.returncode == 1
    assert "no row of train " in done.stderr


def test_gsm8k_from_jsonl_as_openai_published_it(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / f"data/{split}.jsonl", GSM8K)
    prepare("gsm8k", tmp_path / "data", tmp_path / "out")
    assert len(rows(tmp_path / "out/test.parquet")) == 3


def test_a_unicode_line_separator_in_a_text_ends_no_line(tmp_path: Path) -> None:
    question = "Half\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029of 36?"
    lines = json.dumps({**GSM8K[0], "question": question}, ensure_ascii=False) + "\n"
    (tmp_path / "data").mkdir()
    for split in ("train", "test"):
        (tmp_path / f"data/{split}.jsonl").write_text(lines, encoding="utf-8")
    prepare("gsm8k", tmp_path / "data", tmp_path / "out")
    (row,) = rows(tmp_path / "out/train.parquet")
    assert row["prompt"][1]["content"] == question


def test_missing_files_columns_and_torn_files_are_named(tmp_path: Path) -> None:
    from verl_ext.errors import DataError

    with pytest.raises(DataError, match=r"nowhere does not exist; expected a clone of https://huggingface.co"):
        prepare("gsm8k", tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        DataError, match=r"no file for the split 'train'; expected one of main/train-\*.parquet.*found none"
    ):
        prepare("gsm8k", tmp_path / "empty", tmp_path / "out")
    write(tmp_path / "other/train.jsonl", [{"question": "q", "solution": "s"}])
    with pytest.raises(DataError, match=r"train.jsonl, row 0: no column 'answer'; .*columns 'question', 'solution'"):
        prepare("gsm8k", tmp_path / "other", tmp_path / "out")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/train.jsonl").write_text('{"question": "q", "answer": "#### 1"}\n{"question": ')
    with pytest.raises(DataError, match=r"train.jsonl, line 2 .*JSON"):
        prepare("gsm8k", tmp_path / "torn", tmp_path / "out")
    (tmp_path / "lfs").mkdir()
    (tmp_path / "lfs/train.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(DataError, match=r"not a readable parquet file .*git lfs pull"):
        prepare("gsm8k", tmp_path / "lfs", tmp_path / "out")


def test_gsm8k_from_the_hub(tmp_path: Path) -> None:
    gsm8k_clone(tmp_path / "hub/openai/gsm8k")
    with hub.serving(tmp_path / "hub") as (address, fetched):
        network = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        done = run("gsm8k", None, tmp_path / "out", **network)
        assert done.returncode == 0, done.stderr
        # Of the repository only the files that are read.
        assert sorted(set(fetched)) == ["main/test-00000-of-00001.parquet", "main/train-00000-of-00001.parquet"]
        missing = run("gsm8k", None, tmp_path / "other", "--hub_dataset", "nobody/nothing", **network)
    assert len(rows(tmp_path / "out/train.parquet")) == 3
    assert missing.returncode == 1
    assert "'nobody/nothing'" in missing.stderr
    assert "use --local_dataset_path" in missing.stderr


# rlla_4k: verl's columns
def rlla(truth: Any, index: int = 0, **changed: Any) -> dict[str, Any]:
    prompt = [{"role": "system", "content": "Tools:\n1. Name: f"}, {"role": "user", "content": "call f"}]
    row = {
        "data_source": "rlla",
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": index, "instruction": "i", "input": "u", "output": truth},
    }
    return {**row, **changed}


def toolrl_clone(folder: Path, train: list[dict[str, Any]]) -> Path:
    write(folder / "dataset/rlla_4k/train.parquet", train)
    write(folder / "dataset/rlla_4k/test.parquet", [rlla(RESPONSE)])
    return folder


@pytest.mark.parametrize("below", ["", "dataset/rlla_4k"])
def test_tool_calling_from_a_clone(tmp_path: Path, below: str) -> None:
    clone = toolrl_clone(tmp_path / "clone", [rlla(CALL), rlla(RESPONSE, 1)])
    prepare("tool_calling", clone / below, tmp_path / "out")
    train = rows(tmp_path / "out/train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in train] == [CALL, RESPONSE]
    assert train[0]["prompt"] == rlla(CALL)["prompt"]
    assert train[1]["extra_info"] == {"split": "train", "index": 1}
    assert train[0]["data_source"] == "rlla"
    for row in train:
        truth = row["reward_model"]["ground_truth"]
        expected = 4 if truth == CALL else 1
        assert tool_calling.compute_score("rlla", truth, truth, row["extra_info"])["score"] == expected


def test_tool_calling_bad_rows_are_named(tmp_path: Path) -> None:
    from verl_ext.errors import DataError

    bad = [
        rlla(CALL),
        rlla(CALL.replace('{"name"', '{"nam"'), 1),
        rlla("just text", 2),
        rlla(CALL, 3, prompt=[]),
        rlla(CALL, 4, prompt=[{"role": "user", "content": ""}]),
    ]
    clone = toolrl_clone(tmp_path / "clone", bad)
    with pytest.raises(DataError) as caught:
        prepare("tool_calling", clone, tmp_path / "out")
    message = str(caught.value)
    assert "4 of 6 rows" in message
    assert "train row 1: row 1 of 'rlla': the ground truth cannot be read: tool call 1 has no string 'name'" in message
    assert "train row 2: row 2 of 'rlla': the ground truth is not a well-formed answer itself" in message
    assert "train row 3: the prompt has no message" in message
    assert "train row 4: a message of the prompt is not a role with text" in message


def test_tool_calling_from_the_raw_file_makes_the_split_of_toolrl(tmp_path: Path) -> None:
    records = [{"instruction": f"i{n}", "input": f" u{n}\n", "output": CALL} for n in range(160)]
    write(tmp_path / "clone/dataset/rlla_4k_raw/rlla_rl.json", records)
    done = run("tool_calling", tmp_path / "clone", tmp_path / "out", "--raw")
    assert done.returncode == 0, done.stderr
    # ToolRL's dataset/rlla_4k_raw/rlla.py: np.random.seed(31415), np.random.shuffle(dataset), 2 % for the test.
    shuffled = list(range(160))
    np.random.RandomState(31415).shuffle(shuffled)
    test_rows = int(160 * 0.02)
    assert test_rows == 3
    train, test = rows(tmp_path / "out/train.parquet"), rows(tmp_path / "out/test.parquet")
    assert [row["extra_info"]["index"] for row in train] == shuffled[:-3]
    assert [row["extra_info"]["index"] for row in test] == shuffled[-3:]
    assert [message["content"] for message in test[0]["prompt"]] == [f"i{shuffled[-3]}", f" u{shuffled[-3]}\n"]
    assert test[0]["ability"] == "math"


def test_tool_calling_is_on_no_hub_and_says_where_it_is(tmp_path: Path) -> None:
    done = run("tool_calling", None, tmp_path / "out")
    assert done.returncode == 1
    assert "get a clone of https://github.com/qiancheng0/ToolRL" in done.stderr
    assert "--local_dataset_path" in done.stderr


# MATH: columns problem, level, type, solution; MATH-500: problem, solution, answer, subject, level, unique_id
def math(solution: str, level: str = "Level 5") -> dict[str, Any]:
    return {"problem": "What is it?", "level": level, "type": "Algebra", "solution": solution}


MATH500 = [
    {
        "problem": "Half of one?",
        "solution": r"It is $\boxed{\frac{1}{2}}$.",
        "answer": r"\frac{1}{2}",
        "subject": "Algebra",
        "level": 2,
        "unique_id": "test/algebra/1.json",
    }
]


def math_folder(folder: Path, train: list[dict[str, Any]]) -> Path:
    write(folder / "MATH-lighteval/data/train-00000-of-00001.parquet", train)
    write(folder / "MATH-lighteval/data/test-00000-of-00001.parquet", [math(r"\boxed{0}")])
    write(folder / "MATH-500/test.jsonl", MATH500)
    return folder


def prepare_math(source: Path, target: Path, *levels: int) -> str:
    module = script("math")
    return prepare("math", source, target, plan=module.plan(levels or module.LEVELS))


def test_maths_from_clones_of_both(tmp_path: Path) -> None:
    source = math_folder(
        tmp_path / "maths", [math(r"first \boxed{3}, no: $\boxed{x^2+1}$."), math(r"\boxed{5}", "Level ?")]
    )
    prepare_math(source, tmp_path / "out")
    train, test = rows(tmp_path / "out/train.parquet"), rows(tmp_path / "out/math500.parquet")
    assert [row["reward_model"]["ground_truth"] for row in train] == ["x^2+1", "5"]
    assert [row["extra_info"]["level"] for row in train] == [5, 0]
    assert test[0]["reward_model"]["ground_truth"] == r"\frac{1}{2}"
    assert test[0]["data_source"] == "HuggingFaceH4/MATH-500"
    assert boxed_math.compute_score("d", r"\boxed{0.5}", test[0]["reward_model"]["ground_truth"])["score"] == 1


def test_maths_boxes_without_braces_framed_boxes_and_repeating_decimals_are_golds(tmp_path: Path) -> None:
    solutions = [r"so $x = \boxed 12$.", r"Hence $\fbox{6}$.", r"It is $\boxed{0.\overline{72}}$.", r"$\boxed5$"]
    prepare_math(math_folder(tmp_path / "maths", [math(text) for text in solutions]), tmp_path / "out")
    golds = [row["reward_model"]["ground_truth"] for row in rows(tmp_path / "out/train.parquet")]
    assert golds == ["12", "6", r"0.\overline{72}", "5"]
    for solution, gold in zip(solutions, golds, strict=True):
        assert boxed_math.compute_score("d", solution, gold)["score"] == 1


def test_maths_levels_leave_out_what_was_not_asked_for_and_say_so(tmp_path: Path) -> None:
    solutions = [math(rf"\boxed{{{n}}}", f"Level {n}") for n in (1, 2, 3, 4, 5)]
    text = prepare_math(math_folder(tmp_path / "maths", solutions), tmp_path / "out", 3, 4, 5)
    assert "train.parquet: 3 rows, 2 filtered out" in text
    assert [row["extra_info"]["index"] for row in rows(tmp_path / "out/train.parquet")] == [2, 3, 4]
    assert report(tmp_path / "out")["splits"]["train"]["not_asked_for"] == 2
    assert len(rows(tmp_path / "out/math500.parquet")) == 1


def test_maths_bad_rows_are_named(tmp_path: Path) -> None:
    from verl_ext.errors import DataError

    bad = [
        math("it is 3"),
        math(r"\boxed{3"),
        math(r"\boxed{}"),
        math(r"\boxed{" + "9" * 3000 + "}"),
        math(r"\boxed{3}", "hard"),
        math(r"\boxed{3}"),
    ]
    with pytest.raises(DataError) as caught:
        prepare_math(math_folder(tmp_path / "maths", bad), tmp_path / "out")
    message = str(caught.value)
    assert "5 of 7 rows" in message
    for index in (0, 1, 2):
        assert rf"train row {index}: 'solution' has no complete \boxed{{...}} with content" in message
    assert (
        "train row 3: row 3 of 'DigitalLearningGmbH/MATH-lighteval': the ground truth is an answer of 3000" in message
    )
    assert "train row 4: 'level' is 'hard'; expected 'Level 1' to 'Level 5'" in message


def test_maths_from_the_hub_takes_both_data_sets(tmp_path: Path) -> None:
    write(tmp_path / "hub/DigitalLearningGmbH/MATH-lighteval/data/train-00000-of-00001.parquet", [math(r"\boxed{3}")])
    write(tmp_path / "hub/HuggingFaceH4/MATH-500/test.jsonl", MATH500)
    with hub.serving(tmp_path / "hub") as (address, _):
        network = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        done = run("math", None, tmp_path / "out", "--levels", "5", **network)
    assert done.returncode == 0, done.stderr
    assert len(rows(tmp_path / "out/train.parquet")) == len(rows(tmp_path / "out/math500.parquet")) == 1


@pytest.mark.parametrize("recipe", ["tool_calling", "gsm8k"])
def test_verl_reads_the_files(recipe: str, tmp_path: Path) -> None:
    """verl's own data set class on what the script wrote: prompts, and what its reward manager looks for."""
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from verl_ext.cpu.tiny.tokenizer import make_tokenizer

    source = gsm8k_clone(tmp_path / "in") if recipe == "gsm8k" else toolrl_clone(tmp_path / "in", [rlla(CALL)])
    prepare(recipe, source, tmp_path / "out")
    config = OmegaConf.create({"max_prompt_length": 2048, "filter_overlong_prompts": True})
    data = RLHFDataset(str(tmp_path / "out/train.parquet"), make_tokenizer(), config)
    assert len(data) == len(rows(tmp_path / "out/train.parquet"))
    assert data[0]["raw_prompt"][0]["role"] == "system"
    assert data[0]["index"] == 0
    assert data[0]["reward_model"]["ground_truth"]
