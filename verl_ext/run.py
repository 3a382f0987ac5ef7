"""The current run state: that of the trainer inside a trainer, otherwise one per process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from verl_ext.core.state import RunState

_current: ContextVar[RunState] = ContextVar("verl_ext_run_state")
_of_process = RunState()


def run_state() -> RunState:
    """Return the current state. Outside a trainer and outside `use_run_state` it is one object per process.

    >>> run_state().reset()                          # start afresh
    >>> saved = run_state().state_dict()             # plain data
    >>> run_state().load_state_dict(saved)
    """
    return _current.get(_of_process)


@contextmanager
def use_run_state(state: RunState) -> Iterator[RunState]:
    """Use another state inside the block.

    >>> with use_run_state(RunState()) as fresh:
    ...     run_state() is fresh
    True
    """
    token = _current.set(state)
    try:
        yield state
    finally:
        _current.reset(token)
