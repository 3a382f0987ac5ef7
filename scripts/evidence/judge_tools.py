"""Judge answers to BFCL's questions: format and correctness by the recipe's reward, accuracy by BFCL's own checker.

In the environment of recipes/tool_calling/README.md for BFCL:

    .venv-bfcl/bin/python scripts/evidence/judge_tools.py TASK_DIR TASK_DIR/samples.json
    .venv-bfcl/bin/python scripts/evidence/judge_tools.py TASK_DIR RUN/validation/40.jsonl --verdicts verdicts.jsonl

TASK_DIR is the folder of make_real_task.py. The files are its samples.json, or what verl wrote to
trainer.validation_data_dir or trainer.rollout_data_dir. Verdicts hold the entries' ids and no text.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from recipes.tool_calling.bfcl.calls import as_data  # noqa: E402
from verl_ext.rewards.tool_calling import compute_score  # noqa: E402

Row = dict[str, Any]
Verdict = dict[str, Any]
MEASURES = ("format", "correctness", "bfcl")


def category(entry: str) -> str:
    """The category of an entry's id.

    >>> category("live_simple_40-17-0")
    'live_simple'
    """
    return entry.rsplit("_", 1)[0]


def read_rows(folder: Path, name: str) -> list[Row]:
    import pyarrow.parquet

    read: list[Row] = pyarrow.parquet.read_table(folder / f"{name}.parquet").to_pylist()
    return read


def answers(folder: Path, file: Path) -> Iterator[tuple[str, Row, str]]:
    """Of each answer, the set that it belongs to (a temperature, or ""), its row, and its text."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        rows = read_rows(folder, "val")
        for temperature, found in json.loads(text).items():
            number = len(found["answers"]) // len(rows)
            for at, answer in enumerate(found["answers"]):
                yield f"T={temperature}", rows[at // number], answer
        return
    asked = defaultdict(list)
    for name in ("test", "train"):
        for row in read_rows(folder, name):
            asked[row["reward_model"]["ground_truth"]].append(row)
    for record in map(json.loads, text.splitlines()):
        (row,) = [row for row in asked[record["gts"]] if row["prompt"][-1]["content"] in record["input"]]
        yield "", row, record["output"]


class Checker:
    """BFCL's comparison of an answer's calls with the accepted ones."""

    def __init__(self) -> None:
        import bfcl_eval
        from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
        from bfcl_eval.utils import is_function_calling_format_output

        from recipes.tool_calling.bfcl.run import MODEL, register

        register()
        self.model, self.check, self.is_calls = MODEL, ast_checker, is_function_calling_format_output
        self.data = Path(bfcl_eval.__file__).parent / "data"
        self.entries: dict[str, tuple[Any, Any]] = {}

    def load(self, name: str) -> None:
        def records(path: Path) -> list[Any]:
            return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

        truths = {one["id"]: one["ground_truth"] for one in records(self.data / f"possible_answer/BFCL_v3_{name}.json")}
        for entry in records(self.data / f"BFCL_v3_{name}.json"):
            self.entries[entry["id"]] = (entry["function"], truths[entry["id"]])

    def accepts(self, entry: str, text: str) -> bool:
        if entry not in self.entries:
            self.load(category(entry))
        functions, truth = self.entries[entry]
        calls = as_data(text)
        if not calls or not self.is_calls(calls):
            return False
        return bool(self.check(functions, calls, truth, "Python", category(entry), self.model)["valid"])


def correlation(groups: Sequence[Sequence[Verdict]]) -> float:
    """Of format and correctness within groups, pooled over them; not a number if one of them never varies.

    >>> group = [{"format": 0, "correctness": 1}, {"format": 1, "correctness": 3}]
    >>> round(correlation([group, [{"format": 1, "correctness": -3}] * 2]), 3)
    1.0
    """
    sums = [0.0, 0.0, 0.0]
    for group in groups:
        x, y = ([one[key] - mean(each[key] for each in group) for one in group] for key in MEASURES[:2])
        for at, (a, b) in enumerate(((x, y), (x, x), (y, y))):
            sums[at] += sum(left * right for left, right in zip(a, b, strict=True))
    return sums[0] / math.sqrt(sums[1] * sums[2]) if sums[1] * sums[2] else math.nan


def report(name: str, verdicts: Sequence[Verdict]) -> str:
    """Means, by category as well, and what varies within the groups of a question."""
    by_id, by_category = defaultdict(list), defaultdict(list)
    for one in verdicts:
        by_id[one["id"]].append(one)
        by_category[category(one["id"])].append(one)
    lines = []
    for label, part in [(name or "all", verdicts), *sorted(by_category.items())]:
        means = ", ".join(f"{key} {mean(one[key] for one in part):.3f}" for key in MEASURES)
        lines.append(f"{label}: {len(part)} answers, {means}")
    without = [one["correctness"] for one in verdicts if not one["format"]]
    if without:
        lines.append(f"without format: correctness {mean(without):.3f}")
    groups = [group for group in by_id.values() if len(group) > 1]
    if groups:
        vary = [mean(len({one[key] for one in group}) > 1 for group in groups) for key in MEASURES[:2]]
        lines.append(
            f"{len(groups)} groups: format varies in {vary[0]:.3f}, correctness in {vary[1]:.3f}; "
            f"correlation within groups {correlation(groups):.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task_dir", type=Path)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--verdicts", type=Path, help="write a line for each answer")
    chosen = parser.parse_args()
    checker = Checker()
    written = []
    for file in chosen.files:
        sets = defaultdict(list)
        for name, row, text in answers(chosen.task_dir, file):
            entry = row["extra_info"]["id"]
            score = compute_score("bfcl", text, row["reward_model"]["ground_truth"])
            verdict = {"id": entry, "bfcl": float(checker.accepts(entry, text)), **score}
            sets[name].append(verdict)
            written.append({"file": file.name, "set": name, **verdict})
        for name, verdicts in sets.items():
            print(f"{file}\n{report(name, verdicts)}\n")
    if chosen.verdicts:
        chosen.verdicts.write_text("".join(json.dumps(one) + "\n" for one in written), encoding="utf-8")


if __name__ == "__main__":
    main()
