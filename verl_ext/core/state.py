"""The state that a run carries from batch to batch and saves in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_ext.core.chain import State
from verl_ext.errors import CheckpointError, listed


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

    def reset(self) -> None:
        """Forget everything: the next batch counts as the first."""
        self.states.clear()
        self.warned.clear()

    def state_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {estimator: plain_state(state) for estimator, state in self.states.items() if state}

    def load_state_dict(self, data: Mapping[str, Any]) -> None:
        """Replace all states by saved ones, which `Chain.check_state` judges."""
        self.reset()
        self.states.update(data)


def plain_state(state: State) -> dict[str, Any]:
    """Return a copy of a chain's state as JSON restores it; raise `CheckpointError` if JSON would change it.

    >>> plain_state({"mine": (1, 2)})
    Traceback (most recent call last):
    ...
    verl_ext.errors.CheckpointError: the state of 'mine' cannot be saved: JSON changes it to {'mine': [1, 2]}; ...
    """
    try:
        restored: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
        if restored == state:
            return restored
        wrong = f"JSON changes it to {restored!r:.200}"
    except (TypeError, ValueError, RecursionError) as error:
        wrong = str(error)
    raise CheckpointError(
        f"the state of {listed(state)} cannot be saved: {wrong}; it may hold only None, bool, int, finite float, str, "
        "list, and dict with str keys"
    )
