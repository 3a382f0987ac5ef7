"""The tiny tasks by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from verl_ext.cpu.tiny import sums, tools
from verl_ext.cpu.tiny.task import Task
from verl_ext.errors import ConfigurationError, unknown

TASKS: Mapping[str, Task] = MappingProxyType({task.name: task for task in (tools.TASK, sums.TASK)})


def task_named(name: str) -> Task:
    """The task of this name; raise an error that lists the names if there is none."""
    if name not in TASKS:
        raise ConfigurationError(unknown("tiny task", name, TASKS))
    return TASKS[name]
