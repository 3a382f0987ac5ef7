"""Runs of `prepare_data.py`, and small files with the columns of the published data sets."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.recipes.launchers import RECIPES
from verl_ext.recipes.data import command

CALL = '<think> t </think>\n<tool_call>\n{"name": "f", "parameters": {"a": 1, "b": [true, "x"]}}\n</tool_call>'
RESPONSE = "<think> t </think>\n<response> hello </response>"


def script(recipe: str) -> ModuleType:
    path = RECIPES / recipe / "prepare_data.py"
    spec = importlib.util.spec_from_file_location(f"prepare_{recipe}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(recipe: str, source: Path | None, target: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The script as a user runs it."""
    where = ["--local_dataset_path", str(source)] if source else []
    return subprocess.run(
        [sys.executable, str(RECIPES / recipe / "prepare_data.py"), *where, "--local_save_dir", str(target), *options],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def prepare(recipe: str, source: Path, target: Path, *options: str, plan: Any = None) -> str:
    """The same in this process: the printed text, or the error."""
    module = script(recipe)
    parser = command.parser(None, "unused")
    given = parser.parse_args(["--local_dataset_path", str(source), "--local_save_dir", str(target), *options])
    return command.prepare(plan or module.PLAN, given)


def rows(path: Path) -> list[dict[str, Any]]:
    return pyarrow.parquet.read_table(path).to_pylist()


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        path.write_text(json.dumps(records))


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "prepared.json").read_text())


# GSM8K: columns question and answer; main/<split>-00000-of-00001.parquet
GSM8K = [
    {"question": "Half of 36?", "answer": "36/2 = <<36/2=18>>18\n#### 18"},
    {"question": "A thousand?", "answer": "It is said.\n#### 1,000"},
    {"question": "Five less than 0?", "answer": "0-5 = -5\n#### -5"},
]


def gsm8k_clone(folder: Path, train: list[dict[str, Any]] = GSM8K) -> Path:
    write(folder / "main/train-00000-of-00001.parquet", train)
    write(folder / "main/test-00000-of-00001.parquet", GSM8K[:1])
    write(folder / "socratic/train-00000-of-00001.parquet", [{"question": "not", "answer": "read"}])
    return folder


# rlla_4k: verl's columns
def rlla(truth: Any, index: int = 0, **changed: Any) -> dict[str, Any]:
    prompt = [{"role": "system", "content": "Tools:\n1. Name: f"}, {"role": "user", "content": "call f"}]
    row = {
        "data_source": "rlla",
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": index, "instruction": "i", "input": "u", "output": truth},
    }
    return {**row, **changed}


def toolrl_clone(folder: Path, train: list[dict[str, Any]]) -> Path:
    write(folder / "dataset/rlla_4k/train.parquet", train)
    write(folder / "dataset/rlla_4k/test.parquet", [rlla(RESPONSE)])
    return folder
