"""What a run must carry from batch to batch and over a restart."""

from __future__ import annotations

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
    remarked: set[str] = field(default_factory=set)
    """Kinds of remarks that were already given once."""
    readers: dict[str, Callable[[Any], Any]] = field(default_factory=lambda: dict(_READERS), init=False, repr=False)
    """How the saved state of each step is read; a chain with steps of the user's brings its own."""

    def reset(self) -> None:
        """Forget everything: the next batch is the first."""
        self.states.clear()
        self.remarked.clear()

    def state_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            estimator: {step: value.to_dict() if hasattr(value, "to_dict") else value for step, value in state.items()}
            for estimator, state in self.states.items()
            if state
        }

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
