"""Judge answers to BFCL's questions: format and correctness by the recipe's reward, accuracy by BFCL's own checker.

In the environment of recipes/tool_calling/README.md for BFCL:

    .venv-bfcl/bin/python scripts/evidence/judge_tools.py TASK_DIR TASK_DIR/samples.json
    .venv-bfcl/bin/python scripts/evidence/judge_tools.py TASK_DIR RUN/validation/30.jsonl

TASK_DIR is the folder of make_real_task.py. The file is its samples.json, or what verl wrote to
trainer.validation_data_dir or trainer.rollout_data_dir. Prints a line of JSON for each answer, without its text.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bfcl_eval
import pyarrow.parquet
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
from bfcl_eval.utils import is_function_calling_format_output

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.tool_calling.bfcl.calls import as_data
from recipes.tool_calling.bfcl.run import MODEL, register
from verl_ext.rewards.tool_calling import compute_score

DATA = Path(bfcl_eval.__file__).parent / "data"
Row = dict[str, Any]


def read_rows(folder: Path, name: str) -> list[Row]:
    read: list[Row] = pyarrow.parquet.read_table(folder / f"{name}.parquet").to_pylist()
    return read


def read_lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def answers(folder: Path, file: Path) -> Iterator[tuple[str, Row, str]]:
    """Of each answer, the set that it belongs to (a temperature, or ""), its row, and its text."""
    if file.suffix == ".json":
        rows = read_rows(folder, "val")
        for temperature, found in json.loads(file.read_text(encoding="utf-8")).items():
            number = len(found["answers"]) // len(rows)
            for at, answer in enumerate(found["answers"]):
                yield f"T={temperature}", rows[at // number], answer
        return
    asked = defaultdict(list)
    for name in ("test", "train"):
        for row in read_rows(folder, name):
            asked[row["reward_model"]["ground_truth"]].append(row)
    for record in read_lines(file):
        (row,) = [row for row in asked[record["gts"]] if row["prompt"][-1]["content"] in record["input"]]
        yield "test", row, record["output"]


class Checker:
    """BFCL's comparison of an answer's calls with the accepted ones."""

    def __init__(self) -> None:
        register()
        self.entries: dict[str, tuple[Any, Any]] = {}

    def accepts(self, entry: str, text: str) -> bool:
        category = entry.rsplit("_", 1)[0]
        if entry not in self.entries:
            truths = read_lines(DATA / f"possible_answer/BFCL_v3_{category}.json")
            accepted = {one["id"]: one["ground_truth"] for one in truths}
            for one in read_lines(DATA / f"BFCL_v3_{category}.json"):
                self.entries[one["id"]] = (one["function"], accepted[one["id"]])
        calls = as_data(text)
        if not calls or not is_function_calling_format_output(calls):
            return False
        functions, truth = self.entries[entry]
        return bool(ast_checker(functions, calls, truth, "Python", category, MODEL)["valid"])


def main() -> None:
    folder, file = map(Path, sys.argv[1:])
    checker = Checker()
    for kind, row, text in answers(folder, file):
        entry = row["extra_info"]["id"]
        score = compute_score("bfcl", text, row["reward_model"]["ground_truth"])
        verdict = {"kind": kind, "name": entry, "bfcl": float(checker.accepts(entry, text))}
        print(json.dumps({**verdict, "format": score["format"], "correctness": score["correctness"]}))


if __name__ == "__main__":
    main()
