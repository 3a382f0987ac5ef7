"""What a run must carry from batch to batch and over a restart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from verl_ext.core.chain import State
from verl_ext.core.history import WeighByHistory
from verl_ext.errors import CheckpointError, listed

_READERS: Mapping[str, Callable[[Any], Any]] = MappingProxyType({WeighByHistory.name: WeighByHistory.read})


@dataclass
class RunState:
    """The one mutable object: holds the state of a run's estimators, by estimator name.

    Inside verl it belongs to the trainer. A function called outside a trainer uses the one that
    `verl_ext.run_state()` returns, or that of a `with verl_ext.use_run_state(RunState()):` block.

    >>> run = RunState()
    >>> RunState().load_state_dict(run.state_dict())
    """

    states: dict[str, State] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    """Keys of the warnings that were already logged: each is logged once per run."""
    readers: dict[str, Callable[[Any], Any]] = field(default_factory=lambda: dict(_READERS), init=False, repr=False)
    """How the saved state of each step is read; a chain with steps of the user's brings its own."""

    def reset(self) -> None:
        """Forget everything: the next batch is the first."""
        self.states.clear()
        self.warned.clear()

    def state_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {estimator: plain_state(state) for estimator, state in self.states.items() if state}

    def load_state_dict(self, data: Mapping[str, Any]) -> None:
        """Replace all states by saved ones; nothing changes if the data are not sound."""
        states: dict[str, State] = {}
        for estimator, steps in data.items():
            if not isinstance(steps, Mapping):
                raise CheckpointError(f"state of estimator {estimator!r} is not a mapping: {steps!r}")
            if not steps:
                raise CheckpointError(f"state of estimator {estimator!r} is empty")
            if unknown := set(steps) - set(self.readers):
                raise CheckpointError(f"state of {listed(unknown)} is unknown here, known: {listed(self.readers)}")
            states[estimator] = {step: self.readers[step](value) for step, value in steps.items()}
        self.reset()
        self.states.update(states)


def plain_state(state: State) -> dict[str, Any]:
    """A chain's state as plain data; an error that names the step for what JSON would not give back as it was.

    >>> plain_state({"mine": {"seen": (1, 2)}})
    Traceback (most recent call last):
    ...
    verl_ext.errors.CheckpointError: the state of step 'mine' cannot be saved: state['seen'] is (1, 2), a tuple; ...
    """
    found = {}
    for step, value in state.items():
        found[step] = value.to_dict() if hasattr(value, "to_dict") else value
        try:
            wrong = _wrong(found[step], "state")
        except RecursionError:
            wrong = "it is nested too deeply, or holds itself"
        if wrong is not None:
            raise CheckpointError(
                f"the state of step {step!r} cannot be saved: {wrong}; a state, or what its to_dict() returns, is made "
                "of None, bool, int, finite float, str, list, and dict with str keys, for a checkpoint keeps it as JSON"
            )
    return found


def _wrong(value: Any, at: str) -> str | None:
    """What of the value JSON refuses or changes; subclasses would come back as their base."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return None
    if isinstance(value, float):  # numpy's too, which is one
        return None if math.isfinite(value) else f"{at} is {float(value)}"
    if kind is list:
        inner = ((entry, f"{at}[{number}]") for number, entry in enumerate(value))
    elif kind is dict:
        if odd := [key for key in value if type(key) is not str]:
            return f"{at} has the key {odd[0]!r}, {_named(type(odd[0]))}"
        inner = ((entry, f"{at}[{key!r}]") for key, entry in value.items())
    else:
        return f"{at} is {value!r:.80}, {_named(kind)}"
    return next((wrong for entry, where in inner if (wrong := _wrong(entry, where)) is not None), None)


def _named(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'aeiou' else 'a'} {kind.__name__}"
