"""Steps, `(values, batch, state) -> (values, state, metrics)`, and chains, which apply steps in order."""

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
"""Names of other steps, each with the reason why it must, or must not, come before a step.

An error quotes the reason after "because"."""
COMPARED = "center, or another step that compares the responses to a prompt"
"""In `after` and `not_after` of a step: any step that centers or compares."""
State = Mapping[str, Any]
"""State of a chain: the state of each stateful step, by step name."""


@dataclass(frozen=True)
class StepResult:
    """What a step returns: new values `[N, K]`, its new state, and metrics."""

    values: Array
    state: Any = None
    metrics: Metrics = field(default_factory=dict)
    """By short name. The logs prefix it with the name of the estimator."""


@dataclass(frozen=True)
class Step:
    """One transformation of a batch's values. A subclass is a frozen dataclass whose fields are its settings.

    A step defines `name` and `apply`. A step that logs metrics or keeps state from batch to batch defines `transform`
    instead of `apply`. The state is an argument and a result, and the step itself never changes.

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
    """Whether the step compares each value with the rest of its group. If True, the chain sets zero-variance groups to
    exactly 0, and `rollout.n=1` is rejected."""
    centers: ClassVar[bool] = False
    """Whether each group has mean 0 after the step. If True, the ordering rules treat the step like `center`."""
    divides_by_std: ClassVar[bool] = False
    """Whether the step divides by a standard deviation of the rewards, in the group or in the batch. If True, verl's
    `norm_adv_by_std_in_grpo=False` is rejected. Whitening after the sum does not count."""
    sums: ClassVar[bool] = False
    """Whether the step combines all rewards into one value. The ordering rules then treat it like `weighted_sum`."""
    not_with_rubrics: ClassVar[str] = ""
    """Why the step cannot come before the sum if a reward is a rubric, which has one column per criterion. An error
    quotes the reason after "because"."""
    needs_accuracy: ClassVar[bool] = False
    """Whether the step reads `batch.accuracy`."""
    needs_fields: ClassVar[tuple[str, ...]] = ()
    """The fields of verl's batch that the step reads with `batch.field(name)`. Other fields are not fetched."""
    after: ClassVar[Order] = {}
    """Steps that must come before this step, each with the reason."""
    not_after: ClassVar[Order] = {}
    """Steps that must not come before this step, each with the reason."""
    undoes: ClassVar[Order] = {}
    """Steps, or boolean settings of steps, whose effect this step cancels, each with the reason. It is an error if such
    a step comes before this step without a sum in between."""

    def apply(self, values: Array, batch: Batch) -> Array:
        """Return new values `[N, K]`. NaN means "not scored" and must stay NaN."""
        raise NotImplementedError(
            f"The step {type(self).__name__} defines neither `apply` nor `transform`. Add `apply(self, values, batch)`."
        )

    def transform(self, values: Array, batch: Batch, state: Any) -> StepResult:
        """Return new values, the new state and metrics."""
        return StepResult(self.apply(values, batch))

    def parts(self, values: Array, batch: Batch) -> Array | None:
        """Return `[N, K]` the contribution of each reward to the sum, or None if the step has no such contributions."""
        return None

    def init(self) -> Any:
        """Return the state before the first batch, as data that JSON restores unchanged, or None without a state."""
        return None

    def check_state(self, state: Any) -> None:
        """Raise `CheckpointError` if the step cannot continue from a saved state."""


@dataclass(frozen=True)
class Result:
    """The result of applying a chain to a batch."""

    advantages: Array
    """`[N]` the advantage of each row."""
    state: State
    """The state for the next batch."""
    metrics: Metrics
    summed: tuple[Array, Array] | None
    """`[N, K]` each reward's contribution to the sum, and `[N]` the sum with any KL term, or None."""


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
            twice = sorted({name for name in stateful if stateful.count(name) > 1})
            raise ConfigurationError(
                f"A step with a state may occur only once in a chain, but {listed(twice)} occurs more than once. "
                "Remove all but one of them."
            )

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
        """Whether a step processes each reward separately, before the sum."""
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
            raise CheckpointError(
                f"The saved state must map steps to states, found {state!r:.200}. Resume from another checkpoint."
            )
        if foreign := state.keys() - self.init().keys():
            raise CheckpointError(
                f"The saved state of {listed(foreign)} belongs to another estimator. Resume with the estimator that "
                "saved the state."
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
                rubrics = {key for key, name in zip(batch.column_keys, batch.keys, strict=True) if key != name}
                raise ConfigurationError(
                    f"The step {step.name!r} does not support rubrics, because {step.not_with_rubrics}. Use an "
                    f"estimator without this step, or remove {listed(rubrics)} from algorithm.rewards.keys and "
                    "algorithm.rewards.rubrics."
                )
            found = step.transform(values, batch, old.get(step.name))
            after, shape = found.values, (len(values), 1 if step.sums else values.shape[1])
            if not isinstance(after, np.ndarray) or after.shape != shape:
                raise ConfigurationError(
                    f"The step {step.name!r} returns {type(after).__name__} {getattr(after, 'shape', '')}, expected an "
                    f"array of shape {shape}. Return one value for each value that the step gets."
                )
            # A later division would amplify the rounding noise of a zero-variance group.
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
                f"A chain must end with one value per trajectory, but the steps {[step.name for step in self.steps]} "
                f"return {values.shape[1]}. Add weighted_sum, or another step that sums the rewards."
            )
        advantages = values[:, 0]
        return Result(np.where(np.isnan(advantages), 0.0, advantages), new, metrics, summed)


def plain_state(state: State) -> dict[str, Any]:
    """Return a copy of a chain's state as JSON restores it, or raise `CheckpointError` if JSON would change it.

    >>> plain_state({"mine": (1, 2)})
    Traceback (most recent call last):
    ...
    verl_ext.errors.CheckpointError: The state of 'mine' cannot be saved (JSON changes it to {'mine': [1, 2]}). ...
    """
    try:
        restored: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
        if restored == state:
            return restored
        wrong = f"JSON changes it to {restored!r:.200}"
    except (TypeError, ValueError, RecursionError) as error:
        wrong = str(error)
    raise CheckpointError(
        f"The state of {listed(state)} cannot be saved ({wrong}). Return a state that consists only of None, bool, "
        "int, finite float, str, list, and dict with str keys."
    )
