"""GSM8K split for a cold start and for RL: questions of one are not in the other."""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
from recipes.common.data import Plan, Record, Row, Split, prepare, text  # noqa: E402

RECIPE = ROOT / "recipes" / "gsm8k" / "prepare_data.py"
COLD_START, VAL, QUICK = 480, 64, 200
"""Numbers of questions: training rows for the cold start, then for validation (the rest is for RL); test rows."""
MakeRow = Callable[[Record, int], Row | None] | None
_CALCULATION = re.compile(r"<<[^<>]*>>")


def recipe() -> dict[str, Any]:
    """What the recipe's own script defines, for its prompt and its checks."""
    return runpy.run_path(str(RECIPE))


def plan(cold_start: int = COLD_START, val: int = VAL, quick: int = QUICK) -> Plan:
    """The recipe's data set, cut into cold_start, val and train (of its train) and test200 and test (of its test)."""
    published: Plan = recipe()["PLAN"]
    train, test = published.splits

    def with_answer(record: Record, index: int) -> Row:
        row = train.make_row(record, index)
        assert row is not None
        return {**row, "answer": answer(text(record, "answer"), row["reward_model"]["ground_truth"])}

    def cut(split: Split, name: str, start: int, stop: int | None, make_row: MakeRow = None) -> Split:
        return Split(name, split.files, split.columns, make_row or split.make_row, rows=lambda n: range(n)[start:stop])

    splits = (
        cut(train, "cold_start", 0, cold_start, with_answer),
        cut(train, "val", cold_start, cold_start + val),
        cut(train, "train", cold_start + val, None),
        cut(test, f"test{quick}", 0, quick),
        test,
    )
    return Plan(published.name, splits, published.hub, published.where)


def answer(solution: str, gold: str) -> str:
    r"""A published solution in the recipe's format, without the calculator's marks.

    >>> answer("Half is 48/2 = <<48/2=24>>24.\n#### 24", "24")
    '<think>Half is 48/2 = 24.</think>\n<answer>24</answer>'
    """
    reasoning = _CALCULATION.sub("", solution.partition("####")[0]).strip()
    return f"<think>{reasoning}</think>\n<answer>{gold}</answer>"


def write(folder: Path, local: Path | None) -> str:
    """Write the parquet files, from the hub or a folder; return the text to print."""
    options = argparse.Namespace(
        local_dataset_path=local, hub_dataset=None, revision=None, local_save_dir=folder, skip_bad_rows=False
    )
    return prepare(plan(), options)
