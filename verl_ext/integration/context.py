"""What the trainer knows and verl's call of an estimator does not pass on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from verl_ext.core.observe import Metrics
from verl_ext.core.rows import Rows
from verl_ext.integration.components import Components


@dataclass
class StepContext:
    """One advantage computation of one trainer."""

    trainer: Any = None
    loss_agg_mode: str | None = None
    rows: Rows | None = None
    """Padding and sessions, where the trainer knows them."""
    components: Components | None = None
    """Named rewards, where they do not come with the batch."""
    fields: Mapping[str, Any] | None = None
    """verl's `non_tensor_batch`."""
    tensors: Mapping[str, Any] | None = None
    """verl's `batch`."""
    metrics: Metrics = field(default_factory=dict)
    """Filled by the estimator."""
    used: bool = False
    """Whether the estimator was called."""


_current: ContextVar[StepContext | None] = ContextVar("verl_ext_step_context", default=None)


def current() -> StepContext | None:
    """The context in force, None for a call from outside a trainer."""
    return _current.get()


@contextmanager
def activate(context: StepContext) -> Iterator[StepContext]:
    """Put a context in force for the block."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
