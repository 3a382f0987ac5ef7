"""What the trainer knows and verl's call of an estimator does not pass on, and which trainer is fitting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from verl_ext.core.chain import Metrics
from verl_ext.core.rows import Rows
from verl_ext.integration.advantage.components import Components


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


@dataclass
class Fit:
    """One run of a trainer's `fit`, or of its advantage step alone."""

    trainer: Any
    metrics: Metrics = field(default_factory=dict)
    """Of the last advantages; they wait for the step's metrics."""
    computed: bool = False
    """Whether an estimator of ours has been called through our wrapper."""


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


_fit: ContextVar[Fit | None] = ContextVar("verl_ext_fit", default=None)
_fits: list[Fit] = []


def fitting() -> Fit | None:
    """The innermost fit around the caller; a thread does not inherit it and gets the last one of the process."""
    return _fit.get() or (_fits[-1] if _fits else None)


@contextmanager
def fit(trainer: Any) -> Iterator[Fit]:
    """Mark the block as a trainer's fit."""
    found = Fit(trainer)
    token = _fit.set(found)
    _fits.append(found)
    try:
        yield found
    finally:
        # Two fits in one event loop may end in any order, and equal ones are not the same.
        _fits[:] = [other for other in _fits if other is not found]
        _fit.reset(token)
