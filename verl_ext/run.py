"""Which run's state is in force: the trainer's inside a trainer, else one of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from verl_ext.core.state import RunState

_in_force: ContextVar[RunState] = ContextVar("verl_ext_run_state")
_of_process = RunState()


def run_state() -> RunState:
    """The state in force. Outside a trainer and outside `use_run_state` it is one object a process.

    >>> run_state().reset()                          # start afresh
    >>> saved = run_state().state_dict()             # plain data
    >>> run_state().load_state_dict(saved)
    """
    return _in_force.get(_of_process)


@contextmanager
def use_run_state(state: RunState) -> Iterator[RunState]:
    """Put a state in force for the block.

    >>> with use_run_state(RunState()) as fresh:
    ...     run_state() is fresh
    True
    """
    token = _in_force.set(state)
    try:
        yield state
    finally:
        _in_force.reset(token)
