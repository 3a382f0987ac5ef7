"""Steps and their composition: `(values, batch, state) -> (values, state, metrics)`, chained in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

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
    """What a step returns: new values `[N, K]`, its new state, metrics, and warnings, each logged once per run."""

    values: Array
    state: Any = None
    metrics: Metrics = field(default_factory=dict)
    """By short names: the chain puts the step's name, or that of the estimator, before them."""
    warnings: Mapping[str, str] = field(default_factory=dict)


class Step:
    """One small transformation of a batch's values; a subclass is a frozen dataclass whose fields are its settings.

    `name` and `apply` are all that a step needs. The rest has the defaults below:

    - `update` instead of `apply`, for a step that logs metrics, warns, or remembers something from batch to batch. What
      it remembers goes in and out as `state`; the step itself never changes.
    - `init` and `read` for a state that is more than plain data: its first value, and the inverse of its `to_dict()`.
    - `after`, `not_after`, `stands_for`: which steps must stand before this one in a list, and which must not.
    - `check` and `check_state`: what is wrong with settings that are each valid, or with a saved state.

    >>> @dataclass(frozen=True)
    ... class Halve(Step):
    ...     name = "halve"
    ...
    ...     def apply(self, values, batch):
    ...         return values / 2
    >>> Halve().update(np.array([[4.0]]), Batch.of([[4.0]], ["g"]), None).values
    array([[2.]])
    """

    name: ClassVar[str]
    """How a list names the step."""
    needs_accuracy: ClassVar[bool] = False
    """Whether it reads `batch.accuracy`."""
    after: ClassVar[Order] = MappingProxyType({})
    """Steps that must stand before this one, each with the reason."""
    not_after: ClassVar[Order] = MappingProxyType({})
    """Steps that must not stand before this one, each with the reason."""
    stands_for: ClassVar[tuple[str, ...]] = ()
    """Steps whose place it takes in such rules: `("weigh_and_sum",)` for another way to make one value of several."""
    renamed: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Old names of settings to the new ones."""

    def apply(self, values: Array, batch: Batch) -> Array:
        """New values `[N, K]` from `values`; NaN is "not scored" and is passed on."""
        raise NotImplementedError(f"the step {type(self).__name__} defines neither apply nor update")

    def update(self, values: Array, batch: Batch, state: Any) -> Update:  # noqa: ARG002 - part of the contract
        """New values, new state, metrics and warnings."""
        return Update(self.apply(values, batch))

    def init(self) -> Any:
        """State before the first batch; None for a step that remembers nothing."""
        return None

    @staticmethod
    def read(data: Any) -> Any:
        """The state from what a checkpoint holds."""
        return data

    @classmethod
    def check(cls, given: Mapping[str, Any]) -> str | None:  # noqa: ARG003 - part of the contract
        """What is wrong with the given settings together, None if nothing is."""
        return None

    def check_state(self, state: Any) -> None:
        """Raise `CheckpointError` if the step cannot continue from a saved state."""


@dataclass(frozen=True)
class Result:
    """Advantages `[N]`, the state to pass next time, numbers to log, warnings, each logged once per run."""

    advantages: Array
    state: State
    metrics: Metrics
    warnings: Mapping[str, str]


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
        return any(step.needs_accuracy for step in self.steps)

    @property
    def per_reward(self) -> bool:
        """Whether something happens to each reward by itself, before they are summed."""
        return bool(self.steps) and self.steps[0].name != SUM

    @property
    def readers(self) -> dict[str, Callable[[Any], Any]]:
        """How the saved state of each stateful step is read; plain data are the state themselves."""
        return {step.name: step.read for step in self.steps if step.init() is not None}

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
            if step.name in state:
                step.check_state(state[step.name])

    def __call__(self, batch: Batch, state: State | None = None) -> Result:
        """Advantages of one batch; the given state is not changed."""
        old = self.init() if state is None else state
        new: dict[str, Any] = {}
        metrics: Metrics = {}
        warnings: dict[str, str] = {}
        values = batch.rewards
        for step in self.steps:
            update = step.update(values, batch, old.get(step.name))
            values = update.values
            metrics.update({self._metric(step, name): value for name, value in update.metrics.items()})
            warnings.update(update.warnings)
            if update.state is not None:
                new[step.name] = update.state
        if values.shape != (len(batch.rewards), 1):
            raise ConfigurationError(
                f"a chain must end with one value a trajectory, these steps leave values of shape {values.shape}: "
                f"{[step.name for step in self.steps]} need a weigh_and_sum"
            )
        advantages = values[:, 0]
        return Result(np.where(np.isnan(advantages), 0.0, advantages), new, metrics, warnings)

    def _metric(self, step: Step, name: str) -> str:
        """`whiten_std` of the step `whiten` is `gdpo/whiten_std` in gdpo, and `whiten/std` in a user's list."""
        if step.name in self.log_as:
            return f"{self.log_as[step.name]}/{name}"
        return f"{metric_name(step.name)}/{name.removeprefix(f'{step.name}_')}"
