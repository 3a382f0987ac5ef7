"""Give an estimator the data of the trainer that are not arguments of verl's call, and track which trainer runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl_ext.core.chain import Chain
from verl_ext.core.metrics import Metrics
from verl_ext.core.rows import Rows
from verl_ext.errors import IntegrationError, listed
from verl_ext.integration.advantage.components import Components
from verl_ext.integration.compat import hooks
from verl_ext.settings import Settings


class Run(Protocol):
    """What an advantage computation needs of a trainer's run."""

    name: str
    settings: Settings
    chain: Chain | None


@dataclass
class StepContext:
    """One advantage computation of one trainer."""

    trainer: Any = None
    run: Run | None = None
    """The trainer's settings and steps."""
    rows: Rows | None = None
    """Padding and sessions, if the trainer knows them."""
    components: Components | None = None
    """Named rewards, if they are not in the batch."""
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
    """One call of a trainer's `fit`, or of its advantage step alone."""

    trainer: Any
    ours: Callable[[Any], bool]
    """Whether a trainer's estimator is ours; raises if it is and the run was not checked."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics of the last advantages, until they are added to those of the step."""
    computed: bool = False
    """Whether an estimator of ours has been called through our wrapper."""


_current: ContextVar[StepContext | None] = ContextVar("verl_ext_step_context", default=None)


def current() -> StepContext | None:
    """The active context, or None for a call from outside a trainer."""
    return _current.get()


@contextmanager
def activate(context: StepContext) -> Iterator[StepContext]:
    """Make a context the active one within the block."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)


_fit: ContextVar[Fit | None] = ContextVar("verl_ext_fit", default=None)
_fits: list[Fit] = []


def fitting() -> Fit | None:
    """The innermost fit around the caller; in a new thread, the last fit of the process."""
    return _fit.get() or (_fits[-1] if _fits else None)


@contextmanager
def fit(trainer: Any, ours: Callable[[Any], bool]) -> Iterator[Fit]:
    """Mark the block as a trainer's fit."""
    entered = Fit(trainer, ours)
    token = _fit.set(entered)
    _fits.append(entered)
    try:
        yield entered
    finally:
        # Two fits in one event loop may end in any order. Compare by identity: two fits may be equal.
        _fits[:] = [other for other in _fits if other is not entered]
        _fit.reset(token)


def context_of_call(name: str, fields: Any, tensors: Any) -> StepContext:
    """The active context; a new one for a call from outside a trainer, for example in a notebook.

    Raise for a call outside our wrapper while a trainer with an estimator of ours runs in this process: the history
    would not be saved and the metrics would be lost.
    """
    context, around = current(), fitting()
    if around is not None and context is not None:
        around.computed = True
    elif around is not None and around.ours(around.trainer):
        bare = hooks.unwrapped("compute_advantage")
        raise IntegrationError(
            f"{type(around.trainer).__qualname__} called the estimator {name!r} outside verl_ext's wrapper: the "
            "history would not be saved and the metrics would be lost. Call compute_advantage of "
            "verl.trainer.ppo.ray_trainer, imported after verl"
            + (f"; verl's own function without the wrapper is at {listed(bare)}" if bare else "")
        )
    return context or StepContext(fields=fields, tensors=tensors)
