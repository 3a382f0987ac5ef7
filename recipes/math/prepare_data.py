r"""Convert MATH (for training) and MATH-500 (for validation) for verl: train.parquet and math500.parquet.

    python recipes/math/prepare_data.py                                   # from the Hugging Face Hub
    python recipes/math/prepare_data.py --local_dataset_path ~/maths      # a folder with both, or with clones of both

The ground truth is the content of the last \boxed{...} of a solution. A row is invalid if the reward function rejects
its ground truth.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the script runs from every folder
from recipes.common.data import Plan, Record, Row, Split, main, parser, row, text
from verl_ext.errors import DataError
from verl_ext.rewards.boxed_math import check_ground_truth, last_boxed

MATH = "DigitalLearningGmbH/MATH-lighteval"
MATH500 = "HuggingFaceH4/MATH-500"
SYSTEM = r"Reason step by step, and put your final answer in \boxed{}."
LEVELS = (1, 2, 3, 4, 5)


def math_row(record: Record, index: int) -> Row:
    r"""Return a row of MATH. The answer is in the last \boxed{} of the solution."""
    solution = text(record, "solution")
    if not last_boxed(solution):
        raise DataError(r"column 'solution' must contain a complete, non-empty \boxed{...}")
    return _row(record, solution, MATH, "train", index)


def math500_row(record: Record, index: int) -> Row:
    """Return a row of MATH-500, which has a column with the answer."""
    return _row(record, text(record, "answer"), MATH500, "math500", index)


def _row(record: Record, answer: str, source: str, split: str, index: int) -> Row:
    gold = check_ground_truth(answer, f"row {index} of {source!r}")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text(record, "problem")}]
    return row(source=source, prompt=messages, truth=gold, split=split, index=index, level=level_of(record))


def level_of(record: Record) -> int:
    """Return the difficulty, 1 to 5. MATH has "Level 5" and MATH-500 has 5. MATH's "Level ?" is 0."""
    level = record["level"]
    match = re.fullmatch(r"(?:Level )?([1-5?])", str(level))
    if match is None:
        raise DataError(f"column 'level' must be 'Level 1' to 'Level 5', found {level!r}")
    return 0 if match[1] == "?" else int(match[1])


def plan(levels: Collection[int]) -> Plan:
    """Return the plan for MATH-500 and these levels of MATH."""

    def chosen_row(record: Record, index: int) -> Row | None:
        if set(levels) != set(LEVELS) and level_of(record) not in levels:
            return None
        return math_row(record, index)

    return Plan(
        name="MATH",
        splits=(
            Split(
                "train",
                (
                    "data/train-*.parquet",
                    "MATH-lighteval/data/train-*.parquet",
                    "train-*.parquet",
                    "train.parquet",
                    "train.jsonl",
                ),
                ("problem", "level", "solution"),
                chosen_row,
            ),
            Split(
                "math500",
                ("test.jsonl", "MATH-500/test.jsonl", "math500.jsonl", "math500.parquet"),
                ("problem", "answer", "level"),
                math500_row,
                hub=MATH500,
            ),
        ),
        hub=MATH,
        where=f"a folder with clones of https://huggingface.co/datasets/{MATH} and https://huggingface.co/datasets/{MATH500}",
    )


def options() -> argparse.Namespace:
    """Return the options of every recipe, and the levels."""
    made = parser(__doc__, "data/math")
    made.add_argument(
        "--levels", type=int, nargs="+", choices=LEVELS, default=LEVELS, help="levels of MATH to include (default: all)"
    )
    return made.parse_args()


if __name__ == "__main__":
    chosen = options()
    sys.exit(main(plan(chosen.levels), chosen))
