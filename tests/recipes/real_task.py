"""The scripts of the real task as modules, a tiny tokenizer for them, and made-up questions."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pyarrow.parquet

from tests import tiny_model

SCRIPTS = Path(__file__).parents[2] / "scripts/evidence"
sys.path.insert(0, str(SCRIPTS))
make_real_task = importlib.import_module("make_real_task")
cold_start, data, model = (importlib.import_module(f"real.{name}") for name in ("cold_start", "data", "model"))
sys.path.remove(str(SCRIPTS))


def make_tokenizer():
    tokenizer = tiny_model.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [model.END, model.PAD]})
    return tokenizer


def write_questions(folder: Path, train: int, test: int) -> Path:
    folder.mkdir(parents=True)
    for name, count in (("train", train), ("test", test)):
        lines = [
            json.dumps({"question": f"{name} {n}?", "answer": f"It is {n}+0 = <<{n}+0={n}>>{n}.\n#### {n:,}"})
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def rows(path: Path) -> list[dict]:
    return pyarrow.parquet.read_table(path).to_pylist()
