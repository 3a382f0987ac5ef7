"""Convert ToolRL's rlla_4k for verl: train.parquet and test.parquet. Every ground truth is checked.

The data come from ToolACE, Hammer and xLAM. This repository does not redistribute them. Get them from ToolRL:

    git clone https://github.com/qiancheng0/ToolRL
    python recipes/tool_calling/prepare_data.py --local_dataset_path ToolRL

A folder with only `dataset/rlla_4k` works as well. `--raw` reads `dataset/rlla_4k_raw/rlla_rl.json` and makes the split
of ToolRL's `rlla.py`, in the same order. `extra_info.index` is then the position in that file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the script runs from every folder
from recipes.common.data import Plan, Record, Row, Split, main, parser, row
from verl_ext.rewards.tool_calling import check_ground_truth

SOURCE = "rlla"
SEED, TEST_SHARE = 31415, 0.02
"""From ToolRL's split (dataset/rlla_4k_raw/rlla.py)."""
WHERE = "a clone of https://github.com/qiancheng0/ToolRL (dataset/rlla_4k)"


def make_row(record: Record, index: int, split: str) -> Row:
    """Return a row of rlla_4k, which already has verl's columns.

    Only the index of `extra_info` is kept. The rest repeats the prompt and the ground truth, and verl would send it
    with every response.
    """
    return _row(record["prompt"], record["reward_model"]["ground_truth"], split, index)


def raw_row(record: Record, index: int, split: str) -> Row:
    """Return a row of rlla_rl.json, which has instruction, input and output as text."""
    messages = [
        {"role": "system", "content": record["instruction"]},
        {"role": "user", "content": record["input"]},
    ]
    return _row(messages, record["output"], split, index)


def _row(messages: list[dict[str, str]], truth: object, split: str, index: int) -> Row:
    check_ground_truth(truth, f"row {index} of {SOURCE!r}")
    return row(source=SOURCE, prompt=messages, truth=str(truth), split=split, index=index)


def _split(name: str) -> Split:
    return Split(
        name,
        (f"dataset/rlla_4k/{name}.parquet", f"rlla_4k/{name}.parquet", f"{name}.parquet"),
        ("prompt", "reward_model"),
        lambda record, index: make_row(record, index, name),
    )


def train_rows(records: int) -> list[int]:
    """Return the rows of ToolRL's training split: all but the last 2% after shuffling."""
    return _shuffled(records)[: records - int(records * TEST_SHARE)]


def test_rows(records: int) -> list[int]:
    """Return the rows of ToolRL's test split: the last 2% after shuffling, rounded down."""
    return _shuffled(records)[records - int(records * TEST_SHARE) :]


def _shuffled(records: int) -> list[int]:
    order = np.arange(records)
    np.random.RandomState(SEED).shuffle(order)
    return order.tolist()


def _raw_split(name: str, rows: Callable[[int], Sequence[int]]) -> Split:
    return Split(
        name,
        ("dataset/rlla_4k_raw/rlla_rl.json", "rlla_4k_raw/rlla_rl.json", "rlla_rl.json"),
        ("instruction", "input", "output"),
        lambda record, index: raw_row(record, index, name),
        rows=rows,
    )


PLAN = Plan(name="rlla_4k", splits=(_split("train"), _split("test")), hub=None, where=WHERE)
RAW = Plan(
    name="rlla_4k, raw",
    splits=(_raw_split("train", train_rows), _raw_split("test", test_rows)),
    hub=None,
    where=WHERE,
)


def options() -> argparse.Namespace:
    """Return the options of every recipe, and --raw."""
    made = parser(__doc__, "data/tool_calling")
    made.add_argument(
        "--raw",
        action="store_true",
        help=f"read rlla_rl.json and split it as ToolRL does: shuffle with seed {SEED}, then take the last 2%% as test",
    )
    return made.parse_args()


if __name__ == "__main__":
    chosen = options()
    sys.exit(main(RAW if chosen.raw else PLAN, chosen))
