"""Tiny models and data in the formats of the recipes, for runs of the real pipeline."""

from __future__ import annotations

import random
from pathlib import Path

from recipes.quickstart.prepare_data import WORDS, Example, draw, write


def sums(rng: random.Random) -> Example:
    """A sum in GSM8K's format; the thought is the result backwards, and a third of the answers are wrong."""
    first, second = rng.randrange(100), rng.randrange(100)
    total = first + second
    told = total if rng.random() < 0.65 else total + 1
    answer = f"<think>{str(told)[::-1]}</think>\n<answer>{told}</answer>"
    return Example([{"role": "user", "content": f"{first}+{second}"}], f"#### {total}", answer)


def boxed(rng: random.Random) -> Example:
    """A sum, answered in a box."""
    example = sums(rng)
    total = example.ground_truth.removeprefix("#### ")
    return Example(example.messages, total, rf"\boxed{{{total}}}")


TASKS = {
    "tool_calling": (draw, WORDS, "rlla", 120),
    "gsm8k": (sums, WORDS, "openai/gsm8k", 150),
    "math": (boxed, ("\\boxed{",), "HuggingFaceH4/MATH-500", 300),
}
"""For each recipe: its questions, the words of its tokenizer, its data source, and the steps of a short warm-up."""


def make(folder: Path, recipe: str) -> Path:
    """Make a model whose answers are right now and then, so that rewards vary."""
    import torch

    questions, words, source, steps = TASKS[recipe]
    threads = torch.get_num_threads()
    write(folder, questions, words=words, data_source=source, steps=steps, train_rows=64, val_rows=8)
    torch.set_num_threads(threads)
    return folder
