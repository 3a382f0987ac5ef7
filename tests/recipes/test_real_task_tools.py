"""The tool-calling task of scripts/evidence/make_real_task.py, and the judge of its answers, with made-up questions."""

from __future__ import annotations

import doctest
import subprocess
import sys
from itertools import chain

import pytest

from tests.recipes.real_task import SCRIPTS, judge_tools, tools, write_entries
from verl_ext.rewards.tool_calling import check_ground_truth

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


def test_the_page_has_the_table_of_the_stored_runs():
    command = [sys.executable, str(SCRIPTS / "tools_table.py"), str(SCRIPTS / "tools")]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert table in (SCRIPTS.parents[1] / "docs" / "pages" / "real_model.md").read_text()
