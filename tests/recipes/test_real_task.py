"""The two real tasks of scripts/evidence: parts of the data, examples, and the page."""

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
sys.path.insert(0, str(SCRIPTS))
MODULES = {name: importlib.import_module(name) for name in ("real.cold_start", "real.data", "real.tools", "real_tools")}
sys.path.remove(str(SCRIPTS))


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_the_examples_in_the_docstrings_are_right(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


def questions(path):
    return [row["prompt"][-1]["content"] for row in pyarrow.parquet.read_table(path).to_pylist()]


def test_no_question_of_the_cold_start_is_in_validation_or_in_rl(tmp_path):
    for name, count in (("train", 1010), ("test", 7)):
        records = [{"question": f"{name} {n}?", "answer": f"It is {n}.\n#### {n:,}"} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    folders = ["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "made")]
    plan = MODULES["real.data"].plan(cold_start=1005, val=2, quick=3)
    prepare(plan, parser(None, "unused").parse_args(folders))
    parts = [questions(tmp_path / f"made/{name}.parquet") for name in ("cold_start", "val", "train")]
    assert [len(part) for part in parts] == [1005, 2, 3]
    assert list(chain(*parts)) == [f"train {n}?" for n in range(1010)]
    assert questions(tmp_path / "made/test.parquet") == [f"test {n}?" for n in range(7)]


def write_wheel(path, count):
    """A wheel as bfcl-eval's, with questions of one made-up tool; every tenth is asked again, in another category."""
    tool = {"name": "add", "description": "Adds.", "parameters": {"type": "dict", "properties": {"a": {}, "b": {}}}}
    with zipfile.ZipFile(path, "w") as archive:
        for category in MODULES["real.tools"].CATEGORIES:
            asked = {"simple": range(count), "multiple": range(0, count, 10)}.get(category, ())
            entries, truths = [], []
            for n in asked:
                question = [[{"role": "user", "content": f"Add {n} and 1"}]]
                accepted = {"add": {"a": [n, str(n)], "b": [1], "unit": ["", "m"]}}
                entries.append({"id": f"{category}_{n}", "question": question, "function": [tool]})
                truths.append({"id": f"{category}_{n}", "ground_truth": [accepted]})
            for name, lines in ((f"BFCL_v3_{category}", entries), (f"possible_answer/BFCL_v3_{category}", truths)):
                archive.writestr(f"bfcl_eval/data/{name}.json", "\n".join(map(json.dumps, lines)))
    return path


def test_every_question_of_tools_is_in_one_part_only_with_its_first_accepted_values(tmp_path):
    tools, sizes = MODULES["real.tools"], {"test": 4, "cold_start": 8, "val": 2}
    kept = tools.usable(tools.read(write_wheel(tmp_path / "made.whl", 20)), lambda _: (9, 9))
    made = tools.splits(kept, "mixed", sizes)
    assert {name: len(part) for name, part in made.items()} == {**sizes, "train": 6}
    numbers = []
    for row in chain(*made.values()):
        (call,) = check_ground_truth(row["reward_model"]["ground_truth"]).calls
        numbers.append(int(row["prompt"][-1]["content"].split()[1]))
        assert call == {"name": "add", "parameters": {"a": numbers[-1], "b": 1}}
    assert sorted(numbers) == list(range(20))


def test_the_page_has_the_table_of_the_stored_runs():
    command = [sys.executable, str(SCRIPTS / "real_tools.py"), "table"]
    _, differences, _ = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n\n")
    assert differences in (SCRIPTS.parents[1] / "docs" / "pages" / "real_tools.md").read_text()


def test_the_page_of_the_gpu_has_the_differences_of_the_stored_runs():
    def mean(arm, seed, key):
        lines = (SCRIPTS / f"h200/{arm}-{seed}.jsonl").read_text().splitlines()
        return statistics.mean(json.loads(line)["data"][f"reward/{key}/mean"] for line in lines[:15])

    page = (RECIPES.parent / "docs/pages/gpu.md").read_text().replace("\n", " ")
    for key, text in {"format": "by .117 to .242", "correctness": "differs by -.067 to +.008"}.items():
        found = [mean("gdpo", seed, key) - mean("grpo", seed, key) for seed in (1, 2, 4)]
        assert [min(found), max(found)] == pytest.approx([float(x) for x in re.findall(r"[-+]?\.\d+", text)], abs=5e-4)
        assert text in page
