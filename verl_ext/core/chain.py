"""Steps and their composition: `(values, batch, state) -> (values, state, metrics)`, chained in order."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.groups import Array
from verl_ext.core.metrics import Metrics
from verl_ext.errors import CheckpointError, ConfigurationError, listed

Order = Mapping[str, str]
"""Names of other steps, each with the reason why it must, or must not, come before a step."""
COMPARED = "center, or another step that compares the answers to a prompt"
"""In `after` and `not_after` of a step: any step that centers or compares."""
State = Mapping[str, Any]
"""State of a chain: the state of each stateful step, by step name."""


@dataclass(frozen=True)
class StepResult:
    """What a step returns: new values `[N, K]`, its new state, and metrics."""

    values: Array
    state: Any = None
    metrics: Metrics = field(default_factory=dict)
    """By short name; in the logs the name of the estimator comes before it."""


@dataclass(frozen=True)
class Step:
    """One small transformation of a batch's values; a subclass is a frozen dataclass whose fields are its settings.

    A step needs only `name` and `apply`. One that logs metrics or keeps state from batch to batch has `transform`
    instead. The state is an argument and a result; the step itself never changes.

    >>> @dataclass(frozen=True)
    ... class Halve(Step):
    ...     name = "halve"
    ...
    ...     def apply(self, values, batch):
    ...         return values / 2
    >>> Halve().transform(np.array([[4.0]]), Batch.of([[4.0]], ["g"]), None).values
    array([[2.]])
    """

    name: ClassVar[str]
    """The name of the step in a list of steps."""
    compares: ClassVar[bool] = False
    """Whether a value says how it compares with the others of its group: the chain then makes all of a group exactly 0
    that did not vary before, and `rollout.n=1` is refused."""
    centers: ClassVar[bool] = False
    """Whether the mean of each group is 0 after the step, too: it then counts as `center` in the rules of order."""
    divides_by_std: ClassVar[bool] = False
    """Whether the step divides by the spread of the rewards, in the group or in the batch: verl's
    `norm_adv_by_std_in_grpo=False` contradicts it. Whitening, after the sum, is not meant."""
    sums: ClassVar[bool] = False
    """Whether the step makes one value of all rewards: it then counts as `weighted_sum` in the rules of order."""
    not_with_rubrics: ClassVar[str] = ""
    """Why the step cannot stand before the sum where a reward comes by item, with a column for each criterion."""
    needs_accuracy: ClassVar[bool] = False
    """Whether the step reads `batch.accuracy`."""
    needs_fields: ClassVar[tuple[str, ...]] = ()
    """The fields of verl's batch that the step reads with `batch.field(name)`; others are not fetched."""
    after: ClassVar[Order] = {}
    """Steps that must come before this one, each with the reason."""
    not_after: ClassVar[Order] = {}
    """Steps that must not come before this one, each with the reason."""
    undoes: ClassVar[Order] = {}
    """Steps, or settings that are switched on, whose effect this step cancels, each with the reason: an error where
    such a step comes before this one and no sum stands between the two."""

    def apply(self, values: Array, batch: Batch) -> Array:
        """Return new values `[N, K]`. NaN means "not scored": pass it on."""
        raise NotImplementedError(f"the step {type(self).__name__} defines neither apply nor transform")

    def transform(self, values: Array, batch: Batch, state: Any) -> StepResult:
        """Return new values, the new state and metrics."""
        return StepResult(self.apply(values, batch))

    def parts(self, values: Array, batch: Batch) -> Array | None:
        """Return `[N, K]` what each reward adds to the sum, of a step that sums; None if its sum has no such parts."""
        return None

    def init(self) -> Any:
        """Return the state before the first batch, plain data that JSON restores unchanged; None without a state."""
        return None

    def check_state(self, state: Any) -> None:
        """Raise `CheckpointError` if the step cannot continue from a saved state."""


@dataclass(frozen=True)
class Result:
    """What a chain makes of a batch."""

    advantages: Array
    """`[N]`."""
    state: State
    """The state for the next batch."""
    metrics: Metrics
    summed: tuple[Array, Array] | None
    """`[N, K]` what each reward adds to the sum, and `[N]` the sum, with any KL part; None if it has no parts."""


@dataclass(frozen=True)
class Chain:
    """An estimator: steps applied in order, from the rewards of a trajectory to its advantage.

    >>> from verl_ext.core.steps import Center, WeightedSum
    >>> chain = Chain((WeightedSum(), Center()))
    >>> chain(Batch.of([[1.0], [0.0]], ["g", "g"])).advantages
    array([ 0.5, -0.5])
    """

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        stateful = [step.name for step in self.steps if step.init() is not None]
        if len(stateful) != len(set(stateful)):
            raise ConfigurationError(f"a stateful step may occur only once in a chain, found {stateful}")

    @property
    def needs_accuracy(self) -> bool:
        """Whether a step reads the accuracy."""
        return any(step.needs_accuracy for step in self.steps)

    @property
    def needs_fields(self) -> tuple[str, ...]:
        """The fields of verl's batch that the steps read."""
        return tuple(dict.fromkeys(name for step in self.steps for name in step.needs_fields))

    @property
    def per_reward(self) -> bool:
        """Whether a step works on each reward separately, before they are summed."""
        return not (self.steps and self.steps[0].sums)

    @property
    def stateful(self) -> bool:
        """Whether checkpoints must hold the state of this chain."""
        return bool(self.init())

    def init(self) -> State:
        """State before the first batch."""
        return {step.name: state for step in self.steps if (state := step.init()) is not None}

    def check_state(self, state: State) -> None:
        """Raise `CheckpointError` if the steps cannot continue from a saved state."""
        if not (isinstance(state, Mapping) and state):
            raise CheckpointError(f"the saved state must map steps to states, found {state!r:.200}")
        if foreign := state.keys() - self.init().keys():
            raise CheckpointError(
                f"the saved state of {listed(foreign)} belongs to another estimator: resume with the estimator that "
                "saved it, or start from a folder without that state"
            )
        for step in self.steps:
            if step.name in state:
                step.check_state(state[step.name])

    def __call__(self, batch: Batch, state: State | None = None) -> Result:
        """Compute the advantages of one batch. `state` is not modified."""
        old = {**self.init(), **(state or {})}
        new: dict[str, Any] = {}
        metrics: Metrics = {}
        summed, values = None, batch.returns
        for step in self.steps:
            if step.not_with_rubrics and batch.factors is not None and values.shape[1] > 1:
                raise ConfigurationError(
                    f"step {step.name!r} does not work with rewards by item: {step.not_with_rubrics}"
                )
            found = step.transform(values, batch, old.get(step.name))
            after, shape = found.values, (len(values), 1 if step.sums else values.shape[1])
            if not isinstance(after, np.ndarray) or after.shape != shape:
                raise ConfigurationError(
                    f"step {step.name!r} returns {type(after).__name__} {getattr(after, 'shape', '')}, expected an "
                    f"array of the shape {shape}"
                )
            # A division would blow up what rounding leaves of a group without variance.
            if step.centers or step.compares:
                varies = batch.groups.broadcast(batch.groups.varies(values))
                after = np.where(varies | np.isnan(after), after, 0.0)
            if step.sums and (parts := step.parts(values, batch)) is not None:
                summed = parts, after[:, 0]
            values = after
            metrics |= found.metrics
            if found.state is not None:
                new[step.name] = found.state
        if values.shape[1] != 1 or not self.steps:
            raise ConfigurationError(
                f"a chain must end with one value per trajectory, but the steps {[step.name for step in self.steps]} "
                f"return {values.shape[1]}: add weighted_sum, or another step that sums"
            )
        advantages = values[:, 0]
        return Result(np.where(np.isnan(advantages), 0.0, advantages), new, metrics, summed)


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
