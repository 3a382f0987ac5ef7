"""What a tiny task is, and the tasks by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from verl_ext.errors import ConfigurationError, unknown

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
    """Words of its own which are one token each."""
    reward: str
    """The module whose `compute_score` is the reward."""
    keys: tuple[str, ...]
    """The reward's components."""
    accuracy_threshold: float | None
    """Correctness above it is a right answer; None: it is 0 or 1 already."""
    warm_up_steps: int
    """Supervised ones, a minute of one core."""
    prompt_length: int
    response_length: int
    learning_rate: float
    """For reinforcement learning."""


def tasks() -> Mapping[str, Task]:
    """Every tiny task by its name."""
    from verl_ext.cpu.tiny import sums, tools

    return MappingProxyType({task.name: task for task in (tools.TASK, sums.TASK)})


def task_named(name: str) -> Task:
    """The task, or an error that lists the names."""
    found = tasks()
    if name not in found:
        raise ConfigurationError(unknown("tiny task", name, found))
    return found[name]
