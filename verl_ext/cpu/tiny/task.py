"""The dataclasses of a tiny task."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Message = dict[str, str]


@dataclass(frozen=True)
class Example:
    """A question, its ground truth, and an answer to imitate, which may be wrong."""

    messages: Sequence[Message]
    ground_truth: str
    answer: str


@dataclass(frozen=True)
class Task:
    """A source of examples, and how verl scores and trains on them."""

    name: str
    data_source: str
    draw: Callable[[random.Random], Example]
    words: tuple[str, ...]
    """The task's own words, which are one token each."""
    reward: str
    """The module whose `compute_score` is the reward."""
    keys: tuple[str, ...]
    """The reward's components."""
    accuracy_threshold: float | None
    """An answer with a larger correctness is right; None: correctness is 0 or 1."""
    warm_up_steps: int
    """Steps of supervised training, about a minute on one core."""
    prompt_length: int
    response_length: int
    learning_rate: float
    """Of the reinforcement learning."""
