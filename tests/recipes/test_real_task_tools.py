"""The tool-calling task of scripts/evidence/make_real_task.py, and the judge of its answers, with made-up questions."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from collections import Counter
from itertools import chain

import pytest

from tests import tiny_model
from tests.recipes.real_task import SCRIPTS, judge_tools, make_tokenizer, rows, tools, write_entries
from verl_ext.errors import DataError
from verl_ext.rewards.tool_calling import check_ground_truth, compute_score

SIZES = {"test": 4, "cold_start": 8, "val": 2}


def lengths(row):
    return len(row["prompt"][0]["content"].split()), len(row["prompt"][-1]["content"])


@pytest.fixture
def made(tmp_path):
    kept, left_out = tools.usable(tools.read(write_entries(tmp_path / "made.whl", 20)), lengths)
    assert left_out == {"asked before": 2}
    return tools.splits(kept, "mixed", SIZES)


@pytest.mark.parametrize("module", [tools, judge_tools], ids=["tools", "judge_tools"])
def test_the_examples_in_the_docstrings_are_right(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


def test_every_question_is_in_one_part_only(made):
    assert {name: len(part) for name, part in made.items()} == {**SIZES, "train": 6}
    asked = [row["prompt"][-1]["content"] for row in chain(*made.values())]
    assert sorted(asked) == sorted(f"Add {n} and 1" for n in range(20))
    assert all(row["extra_info"]["id"] == f"simple_{row['extra_info']['index']}" for row in chain(*made.values()))


def test_a_ground_truth_has_the_first_accepted_values_without_parameters_that_may_be_left_out(made):
    for row in chain(*made.values()):
        (call,) = check_ground_truth(row["reward_model"]["ground_truth"]).calls
        number = int(row["prompt"][-1]["content"].split()[1])
        assert call == {"name": "add", "parameters": {"a": number, "b": 1}}
        assert '"name": "add"' in row["prompt"][0]["content"]


def test_all_answers_of_the_cold_start_are_correct_and_half_of_the_mixed_ones_have_the_format(made):
    found = Counter(
        (score["format"], score["correctness"])
        for row in made["cold_start"]
        for score in [compute_score("bfcl", row["answer"], row["reward_model"]["ground_truth"])]
    )
    assert found == {(1.0, 3.0): 4, (0.0, 3.0): 4}
    assert sum("<think>" not in row["answer"] for row in made["cold_start"]) == 2
    calls = [{"name": "f", "parameters": {}}]
    assert {tools.cold_answer(calls, "pure", place) for place in range(8)} == {tools.answer(calls)}


def test_entries_that_are_too_long_or_have_no_accepted_value_are_left_out(tmp_path):
    entries = tools.read(write_entries(tmp_path / "made.whl", 3))
    entries[0][1]["ground_truth"][0]["add"]["a"] = []
    kept, left_out = tools.usable(entries[:3], lambda row: (1, 201 if "Add 1 " in row["prompt"][-1]["content"] else 1))
    assert [entry["id"] for entry, _ in kept] == ["simple_2"]
    assert left_out == {"without an accepted value": 1, "too long": 1}
    with pytest.raises(DataError):
        tools.splits(kept, "pure", SIZES)


def test_the_script_makes_the_task(tmp_path):
    tokenizer = make_tokenizer()
    tiny_model.make_model(tokenizer).save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    wheel = write_entries(tmp_path / "made.whl", 560)
    options = ["--start", "pure", "--model", tmp_path / "tiny", "--local_dataset_path", wheel, "--steps", 1]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "make_real_task.py"), "tools", *map(str, options)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "outputs/real/tools-pure"
    assert {path.stem: len(rows(path)) for path in folder.glob("*.parquet")} == {**tools.SIZES, "train": 28}
    samples = json.loads((folder / "samples.json").read_text())
    assert {key: len(found["answers"]) for key, found in samples.items()} == {"1.0": 128, "0.7": 32, "0.0": 32}
    answers = list(judge_tools.answers(folder, folder / "samples.json"))
    assert [row["extra_info"]["id"] for _, row, _ in answers[:5]] == [
        row["extra_info"]["id"] for row in rows(folder / "val.parquet")[:2] for _ in range(4)
    ][:5]


def test_answers_that_verl_dumped_are_matched_with_their_rows(made, tmp_path):
    import pyarrow.parquet

    for name, part in made.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), tmp_path / f"{name}.parquet")
    dumped = [
        {
            "input": f"user {row['prompt'][-1]['content']} a",
            "gts": row["reward_model"]["ground_truth"],
            "output": str(at),
        }
        for at, row in enumerate([made["train"][3], made["test"][1]])
    ]
    (tmp_path / "40.jsonl").write_text("".join(json.dumps(one) + "\n" for one in dumped))
    found = list(judge_tools.answers(tmp_path, tmp_path / "40.jsonl"))
    assert found == [("", made["train"][3], "0"), ("", made["test"][1], "1")]


def test_the_report_has_means_by_category_and_the_correlation_within_groups():
    verdicts = [
        {"id": "simple_1", "format": 1.0, "correctness": 3.0, "bfcl": 1.0},
        {"id": "simple_1", "format": 0.0, "correctness": -3.0, "bfcl": 0.0},
        {"id": "live_simple_2-0-0", "format": 1.0, "correctness": 3.0, "bfcl": 1.0},
        {"id": "live_simple_2-0-0", "format": 1.0, "correctness": 3.0, "bfcl": 0.0},
    ]
    text = judge_tools.report("T=1.0", verdicts)
    assert "T=1.0: 4 answers, format 0.750, correctness 1.500, bfcl 0.500" in text
    assert "live_simple: 2 answers, format 1.000, correctness 3.000, bfcl 0.500" in text
    assert "2 groups: format varies in 0.500, correctness in 0.500; correlation within groups 1.000" in text
