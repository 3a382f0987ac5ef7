"""Sums of numbers with one to three digits, answered as in GDPO's GSM8K experiment.

The thought is the sum written backwards, in the order in which it is computed, so the answers' lengths differ. Of the
answers to imitate, 35 % are wrong in one respect: the number, the format, or the notation of the integer.
"""

from __future__ import annotations

import random

from verl_ext.cpu.tiny.task import Example, Task

WRONG = 0.35
DIGITS = 3


def answer(thought: str, result: str) -> str:
    """An answer in the right format."""
    return f"<think>{thought}</think>\n<answer>{result}</answer>"


def draw(rng: random.Random) -> Example:
    """A question with its ground truth and an answer that may be wrong in one respect."""
    digits = rng.randint(1, DIGITS)
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
    first, second = rng.randint(low, high), rng.randint(low, high)
    total = first + second
    messages = [{"role": "user", "content": f"{first}+{second}"}]
    return Example(messages, f"#### {total}", _answer_to(total, rng))


def _answer_to(total: int, rng: random.Random) -> str:
    right = answer(str(total)[::-1], str(total))
    if rng.random() >= WRONG:
        return right
    kind = rng.randrange(3)
    if kind == 0:
        other = rng.choice([value for value in range(max(0, total - 9), total + 10) if value != total])
        return answer(str(other)[::-1], str(other))
    if kind == 1:
        return rng.choice([right.partition("\n")[2], right.replace("\n", ""), right + "\nok"])
    return answer(str(total)[::-1], f"{total}.0")  # the right number, but not an integer


TASK = Task(
    name="sums",
    data_source="openai/gsm8k",
    draw=draw,
    words=(),
    reward="verl_ext.rewards.gsm8k",
    keys=("correctness", "integer", "format"),
    accuracy_threshold=None,
    warm_up_steps=1600,
    prompt_length=24,
    response_length=32,
    learning_rate=3e-4,
)
