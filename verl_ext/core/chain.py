"""Steps and their composition: `(values, batch, state) -> (values, state, metrics)`, chained in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.groups import Array
from verl_ext.core.observe import Metrics, metric_name
from verl_ext.errors import CheckpointError, ConfigurationError, listed

SUM = "weigh_and_sum"
Order = Mapping[str, str]
"""Names of steps to the reason why they must, or must not, stand before a step."""
State = Mapping[str, Any]
"""State of a chain: the state of each stateful step under the step's name. Plain data, fit for JSON."""


@dataclass(frozen=True)
class Update:
    """What a step returns: new values `[N, K]`, its new state, numbers to log, and remarks worth one warning each."""

    values: Array
    state: Any = None
    metrics: Metrics = field(default_factory=dict)
    """By short names: the chain puts the step's name, or that of the estimator, before them."""
    remarks: Mapping[str, str] = field(default_factory=dict)


class Step(Protocol):
    """One small transformation of the values, pure: what it remembers goes in and out as `state`."""

    name: ClassVar[str]
    # Optional, for lists that users write: `after` and `not_after` map names of steps that must, or must not, stand
    # before this one to the reason; `stands_for` names steps whose place it takes in such rules; `check(given)` says
    # what is wrong with settings that are each valid; `read(data)` is the inverse of a state's `to_dict()`, for a
    # state that is more than plain data.

    def init(self) -> Any:
        """State before the first batch; None for a step that remembers nothing."""

    def update(self, values: Array, batch: Batch, state: Any) -> Update:
        """Transform `[N, K]` values."""


@dataclass(frozen=True)
class Result:
    """Advantages `[N]`, the state to pass next time, numbers to log, remarks worth one warning each."""

    advantages: Array
    state: State
    metrics: Metrics
    remarks: Mapping[str, str]


@dataclass(frozen=True)
class Chain:
    """An estimator: steps applied one after another, from a trajectory's rewards to its advantage.

    >>> from verl_ext.core.steps import Centre, WeighAndSum
    >>> chain = Chain((WeighAndSum(), Centre()))
    >>> chain(Batch.of([[1.0], [0.0]], ["g", "g"])).advantages
    array([ 0.5, -0.5])
    """

    steps: tuple[Step, ...]
    log_as: Mapping[str, str] = field(default_factory=dict, compare=False)
    """By a step's name, what stands before its metrics; the step's own name where nothing is given."""

    def __post_init__(self) -> None:
        stateful = [step.name for step in self.steps if step.init() is not None]
        if len(stateful) != len(set(stateful)):
            raise ConfigurationError(f"a step with a state may stand once in a chain, found {stateful}")

    @property
    def needs_accuracy(self) -> bool:
        """Whether a step weighs by the prompts' difficulty."""
        return any(getattr(step, "needs_accuracy", False) for step in self.steps)

    @property
    def per_reward(self) -> bool:
        """Whether something happens to each reward by itself, before they are summed."""
        return bool(self.steps) and self.steps[0].name != SUM

    @property
    def readers(self) -> dict[str, Callable[[Any], Any]]:
        """How the saved state of each stateful step is read; plain data are the state themselves."""
        stateful = [step for step in self.steps if step.init() is not None]
        return {step.name: getattr(step, "read", lambda data: data) for step in stateful}

    @property
    def stateful(self) -> bool:
        """Whether a run must save and restore something to continue with the same numbers."""
        return bool(self.init())

    def init(self) -> State:
        """State before the first batch."""
        return {step.name: state for step in self.steps if (state := step.init()) is not None}

    def check_state(self, state: State) -> None:
        """Refuse a saved state that the steps cannot go on from."""
        if strange := set(state) - set(self.readers):
            raise CheckpointError(
                f"the saved state is of {listed(strange)}, of which these steps are none: "
                f"{', '.join(step.name for step in self.steps)}"
            )
        for step in self.steps:
            if step.name in state and hasattr(step, "check_state"):
                step.check_state(state[step.name])

    def __call__(self, batch: Batch, state: State | None = None) -> Result:
        """Advantages of one batch; the given state is not changed."""
        old = self.init() if state is None else state
        new: dict[str, Any] = {}
        metrics: Metrics = {}
        remarks: dict[str, str] = {}
        values = batch.rewards
        for step in self.steps:
            update = step.update(values, batch, old.get(step.name))
            values = update.values
            metrics.update({self._metric(step, name): value for name, value in update.metrics.items()})
            remarks.update(update.remarks)
            if update.state is not None:
                new[step.name] = update.state
        if values.shape != (len(batch.rewards), 1):
            raise ConfigurationError(
                f"a chain must end with one value a trajectory, these steps leave values of shape {values.shape}: "
                f"{[step.name for step in self.steps]} need a weigh_and_sum"
            )
        advantages = values[:, 0]
        return Result(np.where(np.isnan(advantages), 0.0, advantages), new, metrics, remarks)

    def _metric(self, step: Step, name: str) -> str:
        """`whiten_std` of the step `whiten` is `gdpo/whiten_std` in gdpo, and `whiten/std` in a user's list."""
        if step.name in self.log_as:
            return f"{self.log_as[step.name]}/{name}"
        return f"{metric_name(step.name)}/{name.removeprefix(f'{step.name}_')}"
