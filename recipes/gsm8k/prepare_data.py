"""Convert GSM8K for verl: train.parquet and test.parquet, with the gold integer as the ground truth.

python recipes/gsm8k/prepare_data.py                                # from the Hugging Face Hub
python recipes/gsm8k/prepare_data.py --local_dataset_path ~/gsm8k   # a clone, or a folder with its files

A row is invalid if its gold answer is not an integer.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the script runs from every folder
from recipes.common.data import Plan, Record, Row, Split, main, parser, row, text
from verl_ext.errors import DataError
from verl_ext.rewards.gsm8k import check_ground_truth

HUB = "openai/gsm8k"
SYSTEM = (
    "Solve the problem step by step. Write your reasoning between <think> and </think>, then, on the next line, the "
    "final answer, one integer and nothing else, between <answer> and </answer>:\n"
    "<think>your reasoning</think>\n<answer>your integer</answer>"
)


def make_row(record: Record, index: int, split: str) -> Row:
    """Return a row with the question, the system prompt of this recipe, and the gold answer."""
    solution = text(record, "answer")
    if "####" not in solution:
        raise DataError(f"column 'answer' must have '####' before the result, found {solution[-200:]!r}")
    gold = check_ground_truth(solution, f"row {index} of {HUB!r}")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text(record, "question")}]
    return row(source=HUB, prompt=messages, truth=gold, split=split, index=index)


def _split(name: str) -> Split:
    files = (f"main/{name}-*.parquet", f"{name}-*.parquet", f"{name}.parquet", f"{name}.jsonl")
    return Split(name, files, ("question", "answer"), lambda record, index: make_row(record, index, name))


PLAN = Plan(
    name="GSM8K",
    splits=(_split("train"), _split("test")),
    hub=HUB,
    where="a clone of https://huggingface.co/datasets/openai/gsm8k, or a folder with train.jsonl and test.jsonl",
)

if __name__ == "__main__":
    sys.exit(main(PLAN, parser(__doc__, "data/gsm8k").parse_args()))
