"""Tool calling with made-up tools, answered as in ToolRL's `rlla` data.

A question offers two tools, and its words name one of them and two values. One call answers it. Of the answers to
imitate, 20 % are right, 40 % have a wrong call in the right format, and 40 % have the right call in a wrong format: an
answer is wrong in one respect only. So the two rewards conflict at first, and the larger one, correctness from -3 to 3,
can drown the smaller one, format 0 or 1.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from verl_ext.cpu.tiny.task import Example, Task

RIGHT, WRONG_CALL = 0.2, 0.4
"""Shares of the answers to imitate; the rest are wrong in their format."""

TOOLS: dict[str, tuple[str, str]] = {
    "timer": ("minutes", "label"),
    "play": ("volume", "song"),
    "light": ("level", "room"),
    "mail": ("hour", "to"),
    "book": ("seats", "place"),
    "search": ("limit", "topic"),
}
"""Name to parameters: the first takes a number, the second a word."""

NUMBERS = range(1, 10)
VALUES = ("tea", "jazz", "hall", "anna", "rome", "music", "lunch", "garden", "train", "news")


@dataclass(frozen=True)
class Call:
    """One call of a tool."""

    name: str
    number: int
    word: str

    @property
    def text(self) -> str:
        """The call as one line of JSON."""
        first, second = TOOLS[self.name]
        return json.dumps({"name": self.name, "parameters": {first: self.number, second: self.word}})


def answer(call: str, thought: str) -> str:
    """An answer in the right format."""
    return f"<think>{thought}</think>\n<tool_call>\n{call}\n</tool_call>"


def describe(names: Sequence[str]) -> str:
    """The tools that a question offers."""
    return "".join(f"Name: {name}\nParameters: {', '.join(TOOLS[name])}\n" for name in names)


def draw(rng: random.Random) -> Example:
    """A question with its ground truth and an answer that may be wrong in one respect."""
    name, other = rng.sample(sorted(TOOLS), 2)
    call = Call(name, rng.choice(NUMBERS), rng.choice(VALUES))
    offered = [name, other] if rng.random() < 0.5 else [other, name]
    question = f"{call.name} {call.number} {call.word}"
    truth = answer(call.text, name)
    luck = rng.random()
    if luck < RIGHT:
        attempt = truth
    elif luck < RIGHT + WRONG_CALL:
        attempt = answer(_wrong_call(call, other, rng), name)
    else:
        attempt = rng.choice(WRONG_FORMATS)(truth)
    messages = [{"role": "system", "content": describe(offered)}, {"role": "user", "content": question}]
    return Example(messages, truth, attempt)


def _wrong_call(call: Call, other: str, rng: random.Random) -> str:
    """The other tool, another number, a wrong key, or no JSON."""
    kind = rng.randrange(4)
    if kind == 0:
        return replace(call, name=other).text
    if kind == 1:
        return replace(call, number=rng.choice([number for number in NUMBERS if number != call.number])).text
    return call.text.replace('"parameters"', '"arguments"') if kind == 2 else call.text.removesuffix("}")


WRONG_FORMATS: tuple[Callable[[str], str], ...] = (
    lambda text: text.partition("</think>\n")[2],  # no thought
    lambda text: text.replace("</think>\n", "</think>"),  # no line of its own
    lambda text: text.replace("</think>\n", "</think>\n\n"),
    lambda text: text + "\nok",
)

TASK = Task(
    name="tools",
    data_source="rlla",
    draw=draw,
    words=(*TOOLS, *(name for names in TOOLS.values() for name in names), *VALUES),
    reward="verl_ext.rewards.tool_calling",
    keys=("correctness", "format"),
    accuracy_threshold=2.9,
    warm_up_steps=1200,
    prompt_length=64,
    response_length=48,
    learning_rate=1e-4,
)
