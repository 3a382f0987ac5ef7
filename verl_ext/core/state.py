"""The state that a run carries from batch to batch and saves in checkpoints."""

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
    """The states of a run's estimators, by estimator name: the only object of the core that changes.

    Inside verl it belongs to the trainer. Outside a trainer, estimators use the one that `verl_ext.run_state()`
    returns; `with verl_ext.use_run_state(RunState()):` sets another one for a block.

    >>> run = RunState()
    >>> RunState().load_state_dict(run.state_dict())
    """

    states: dict[str, State] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    """Keys of the warnings that were already logged: each is logged once per run."""
    readers: dict[str, Callable[[Any], Any]] = field(default_factory=lambda: dict(_READERS), init=False, repr=False)
    """The name of each step to the function that reads its saved state. Chains add those of a user's steps."""

    def reset(self) -> None:
        """Forget everything: the next batch counts as the first."""
        self.states.clear()
        self.warned.clear()

    def state_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {estimator: plain_state(state) for estimator, state in self.states.items() if state}

    def load_state_dict(self, data: Mapping[str, Any]) -> None:
        """Replace all states by saved ones. If the data are invalid, raise `CheckpointError` and change nothing."""
        states: dict[str, State] = {}
        for estimator, steps in data.items():
            if not isinstance(steps, Mapping):
                raise CheckpointError(f"state of estimator {estimator!r} is not a mapping: {steps!r}")
            if not steps:
                raise CheckpointError(f"state of estimator {estimator!r} is empty")
            if unknown := set(steps) - set(self.readers):
                raise CheckpointError(
                    f"the saved state has unknown steps {listed(unknown)}; known: {listed(self.readers)}"
                )
            states[estimator] = {step: self.readers[step](value) for step, value in steps.items()}
        self.reset()
        self.states.update(states)


def plain_state(state: State) -> dict[str, Any]:
    """The state of a chain as plain data. Raise `CheckpointError` for a value that JSON would not restore unchanged.

    >>> plain_state({"mine": {"seen": (1, 2)}})
    Traceback (most recent call last):
    ...
    verl_ext.errors.CheckpointError: the state of step 'mine' cannot be saved: state['seen'] is (1, 2), a tuple; ...
    """
    plain = {}
    for step, value in state.items():
        plain[step] = value.to_dict() if hasattr(value, "to_dict") else value
        try:
            wrong = _not_json(plain[step], "state")
        except RecursionError:
            wrong = "it is nested too deeply, or contains itself"
        if wrong is not None:
            raise CheckpointError(
                f"the state of step {step!r} cannot be saved: {wrong}; checkpoints are JSON, so a state, or what its "
                "to_dict() returns, may hold only None, bool, int, finite float, str, list, and dict with str keys"
            )
    return plain


def _not_json(value: Any, at: str) -> str | None:
    """Return which part of the value JSON rejects or changes, or None. Subclasses would be read as their base class."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return None
    if isinstance(value, float):  # np.float64 is a float
        return None if math.isfinite(value) else f"{at} is {float(value)}"
    if kind is list:
        inner = ((entry, f"{at}[{number}]") for number, entry in enumerate(value))
    elif kind is dict:
        if odd := [key for key in value if type(key) is not str]:
            return f"{at} has the key {odd[0]!r}, {_with_article(type(odd[0]))}"
        inner = ((entry, f"{at}[{key!r}]") for key, entry in value.items())
    else:
        return f"{at} is {value!r:.80}, {_with_article(kind)}"
    return next((wrong for entry, where in inner if (wrong := _not_json(entry, where)) is not None), None)


def _with_article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'aeiou' else 'a'} {kind.__name__}"
