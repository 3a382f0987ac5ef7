"""The scripts of the real task as modules, and made-up questions."""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
from pathlib import Path

import pyarrow.parquet

SCRIPTS = Path(__file__).parents[2] / "scripts/evidence"
sys.path.insert(0, str(SCRIPTS))
judge_tools = importlib.import_module("judge_tools")
cold_start, data, tools = (importlib.import_module(f"real.{name}") for name in ("cold_start", "data", "tools"))
sys.path.remove(str(SCRIPTS))


def write_questions(folder: Path, train: int, test: int) -> Path:
    folder.mkdir(parents=True)
    for name, count in (("train", train), ("test", test)):
        lines = [
            json.dumps({"question": f"{name} {n}?", "answer": f"It is {n}+0 = <<{n}+0={n}>>{n}.\n#### {n:,}"})
            for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def write_entries(path: Path, count: int) -> Path:
    """A wheel as bfcl-eval's, with questions of one made-up tool; every tenth is asked again, in another category."""
    entries = [
        {
            "id": f"simple_{n}",
            "question": [[{"role": "user", "content": f"Add {n} and 1"}]],
            "function": [
                {
                    "name": "add",
                    "description": "Adds.",
                    "parameters": {"type": "dict", "properties": {"a": {}, "b": {}}},
                }
            ],
        }
        for n in range(count)
    ]
    truths = [
        {"id": f"simple_{n}", "ground_truth": [{"add": {"a": [n, str(n)], "b": [1], "unit": ["", "m"]}}]}
        for n in range(count)
    ]
    with zipfile.ZipFile(path, "w") as archive:
        for category in tools.CATEGORIES:
            for name, found in ((f"BFCL_v3_{category}", entries), (f"possible_answer/BFCL_v3_{category}", truths)):
                kept = found if category == "simple" else found[::10] if category == "multiple" else []
                lines = [json.dumps({**one, "id": one["id"].replace("simple", category)}) for one in kept]
                archive.writestr(f"bfcl_eval/data/{name}.json", "\n".join(lines))
    return path


def rows(path: Path) -> list[dict]:
    return pyarrow.parquet.read_table(path).to_pylist()
