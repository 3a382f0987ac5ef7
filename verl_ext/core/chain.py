"""Steps, `(values, batch, state) -> (values, state, metrics)`, and chains, which apply steps in order."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.groups import Array
from verl_ext.core.metrics import Metrics
from verl_ext.errors import CheckpointError, ConfigurationError, listed

State = Mapping[str, Any]
"""State of a chain: the state of each stateful step, by step name."""


@dataclass(frozen=True)
class StepResult:
    """The result of a step's `transform`: new values, the new state, and metrics.

    >>> StepResult(np.array([[1.0], [-1.0]]), metrics={"clipped_fraction": 0.1}).metrics
    {'clipped_fraction': 0.1}
    """

    values: Array
    """`[N, K]` the new values, or `[N, 1]` of a step that sums. NaN means "not scored"."""
    state: Any = None
    """The state for the next batch, or None for a step without a state."""
    metrics: Metrics = field(default_factory=dict)
    """Numbers to log, by a short name that the logs prefix with the name of the estimator."""


_ORDER = (
    "A list of steps is measured on synthetic batches instead, and the attributes `before_sum`, `after_center` and "
    "`before_center` declare its place."
)
_UNKNOWN_ATTRIBUTES = {
    "weights": "Remove it, and read the weights of the rewards from `batch.weights`.",
    "after": f"Remove it. {_ORDER}",
    "not_after": f"Remove it. {_ORDER}",
    "undoes": f"Remove it. {_ORDER}",
}
"""Attributes that a custom step could define in vain, each with what to do instead."""


@dataclass(frozen=True)
class Step:
    """One transformation of a batch's values. A subclass is a frozen dataclass whose fields are its settings.

    A step defines `name` and `apply`. A step that logs metrics or keeps state from batch to batch defines `transform`
    instead of `apply`. The state is an argument and a result, and the step itself never changes. A list names a custom
    step as `package.module:Class`, which needs no registration.

    The class attributes below say what the step returns, what it needs, and where in a list it works. A list that
    contradicts them is rejected before training. Values are `[N, K]`, one row per response (with per-turn rewards: per
    turn) and one column per reward. After the sum they are `[N, 1]`. NaN means "not scored".

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

    # What the step does. Other parts of the package read these attributes; no list of step names exists elsewhere.
    #
    # Six attributes are about the groups of a batch:
    #
    # - `centers` and `compares` say what the step returns: values with mean 0, or values relative to the rest of their
    #   group whose mean may differ from 0. After either of them, the chain sets zero-variance groups to 0.
    # - `zero_without_variance` says the same about the zero-variance groups alone, and that the step itself does it.
    # - `needs_centered`, `after_center` and `before_center` reject lists. `needs_centered` is measured: the values that
    #   the step gets must have mean 0. The other two only declare an order. With `after_center`, a step that centers or
    #   compares must come somewhere before. With `before_center`, a step that centers must come somewhere after.
    centers: ClassVar[bool] = False
    """Whether each group has mean 0 after the step. If True, the chain sets zero-variance groups to exactly 0."""
    compares: ClassVar[bool] = False
    """Whether the step compares each value with the rest of its group. If True, the chain sets zero-variance groups to
    exactly 0, and `rollout.n=1` is rejected."""
    zero_without_variance: ClassVar[bool] = False
    """Whether groups with zero variance are exactly 0 after the step, although it neither centers nor compares. If
    True, `rollout.n=1` is rejected."""
    sums: ClassVar[bool] = False
    """Whether the step combines all rewards of a response into one value, a single column. A list has exactly one such
    step."""
    adds_kl: ClassVar[bool] = False
    """Whether the step adds the KL term of the reward, `batch.kl_reward`, to the sum. If no step of a list does,
    `algorithm.use_kl_in_reward=True` is rejected."""
    divides_by_std: ClassVar[bool] = False
    """Whether the step divides by the standard deviation of the rewards, or by another measure of their scale, in the
    group or in the batch. If True, verl's `norm_adv_by_std_in_grpo=False` is rejected. Whitening after the sum does not
    count."""
    reads_one_group: ClassVar[bool] = False
    """Whether the result for a group depends only on the rewards of this group. The group filter `any_reward` applies
    such steps to groups one by one."""
    rescales_batch: ClassVar[bool] = False
    """Whether the step multiplies all values of a reward in the batch by the same positive number."""

    # What the step needs.
    needs_accuracy: ClassVar[bool] = False
    """Whether the step reads the accuracy, with `batch.accuracy_for(self.name)`."""
    needs_fields: ClassVar[tuple[str, ...]] = ()
    """The fields of verl's batch that the step reads with `batch.field(name)`, which has one entry per response. Other
    fields are not fetched. In a list with such a step, other steps need not have an effect on synthetic batches."""
    needs_nonnegative: ClassVar[bool] = False
    """Whether the step needs values of at least 0."""
    needs_centered: ClassVar[bool] = False
    """Whether the values that the step gets must have mean 0 in each group. Tested on synthetic batches at start-up."""
    before_sum: ClassVar[bool] = False
    """Whether the step needs the separate rewards of a response, so that it must come before the sum."""
    after_center: ClassVar[bool] = False
    """Whether the step needs values relative to their group: a step that centers or compares must come first."""
    before_center: ClassVar[bool] = False
    """Whether the values that the step returns must be compared, so that a step that centers must come later."""
    not_with_rubrics: ClassVar[str] = ""
    """Why the step cannot come before the sum if a reward is a rubric, which has one column per criterion. An error
    quotes the reason after "because"."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        annotations = vars(cls).get("__annotations__", {})
        for name, remedy in _UNKNOWN_ATTRIBUTES.items():
            if hasattr(cls, name) or name in annotations:
                raise ConfigurationError(f"The step {cls.__qualname__} defines {name!r}, which has no effect. {remedy}")
        for name, annotation in annotations.items():
            if hasattr(Step, name) and "ClassVar" not in str(annotation):
                raise ConfigurationError(
                    f"The step {cls.__qualname__} declares {name!r} as a setting, but it is an attribute of Step. "
                    f"Write `{name}: ClassVar[...] = ...`, or give the setting another name."
                )

    def apply(self, values: Array, batch: Batch) -> Array:
        """Return new values `[N, K]`. NaN means "not scored" and must stay NaN.

        To exclude a response, return NaN for all its values. Whitening then ignores it, and its advantage is 0.
        `batch.rewards` and `batch.raw` are read-only.
        """
        raise NotImplementedError(
            f"The step {type(self).__name__} defines neither `apply` nor `transform`. Add `apply(self, values, batch)`."
        )

    def transform(self, values: Array, batch: Batch, state: Any) -> StepResult:
        """Return new values, the new state and metrics. `state` is the one that the previous batch returned."""
        return StepResult(self.apply(values, batch))

    def contributions(self, values: Array, batch: Batch) -> Array | None:
        """Return `[N, rewards]` the contribution of each reward to the sum, or None if the step has none.

        A step that sums overrides this method for the metric `advantage/contribution/<key>`.
        """
        return None

    def for_rewards(self, count: int) -> Step:
        """Return the step for `count` rewards in [0, 1]. A step with one setting per reward overrides this method."""
        return self

    @property
    def min_reward(self) -> float:
        """The number that no reward may fall below. A step with such a limit overrides this property."""
        return -math.inf

    def init(self) -> Any:
        """Return the state before the first batch, or None without a state.

        Checkpoints save the state, so it must be data that JSON restores unchanged.
        """
        return None

    def check_state(self, state: Any) -> None:
        """Raise `CheckpointError` if the step cannot continue from a saved state."""


@dataclass(frozen=True)
class Result:
    """The result of applying a chain to a batch."""

    advantages: Array
    """`[N]` the advantage of each segment."""
    state: State
    """The state for the next batch."""
    metrics: Metrics
    contributions: Array | None
    """`[N, rewards]` each reward's contribution to the sum, or None if the sum has no such contributions."""
    total: Array | None
    """`[N]` the sum of the rewards with any KL term, or None if there are no contributions."""


@dataclass(frozen=True)
class Chain:
    """An estimator: steps applied in order, from the rewards of a trajectory to its advantage.

    >>> from verl_ext.core.steps import Center, WeightedSum
    >>> chain = Chain((WeightedSum(), Center()))
    >>> chain(Batch.of([[1.0], [0.0]], ["g", "g"])).advantages
    array([ 0.5, -0.5])
    """

    steps: tuple[Step, ...]
    weights: tuple[float, ...] | None = None
    """`algorithm.rewards.weights`, which the chain puts into each batch. None: the weights of the batch, 1 each."""

    def __post_init__(self) -> None:
        count_of_name = Counter(step.name for step in self._steps_with_state)
        repeated = [name for name, count in count_of_name.items() if count > 1]
        if repeated:
            raise ConfigurationError(
                f"A step with a state may occur only once in a chain, but {listed(repeated)} occurs more than once. "
                "Remove all but one of them."
            )

    @cached_property
    def _steps_with_state(self) -> tuple[Step, ...]:
        """The steps that keep a state from batch to batch."""
        return tuple(step for step in self.steps if step.init() is not None)

    @cached_property
    def needs_accuracy(self) -> bool:
        """Whether a step reads the accuracy."""
        return any(step.needs_accuracy for step in self.steps)

    @cached_property
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
        return len(self._steps_with_state) > 0

    def init(self) -> State:
        """Return the state before the first batch, by the names of the steps that have one."""
        return {step.name: step.init() for step in self._steps_with_state}

    def check_state(self, state: State) -> None:
        """Raise `CheckpointError` if the steps cannot continue from a saved state."""
        if not (isinstance(state, Mapping) and state):
            raise CheckpointError(
                f"The saved state must map steps to states, found {state!r:.200}. Resume from another checkpoint."
            )
        foreign = state.keys() - self.init().keys()
        if foreign:
            raise CheckpointError(
                f"The saved state of {listed(foreign)} belongs to another estimator. Resume with the estimator that "
                "saved the state."
            )
        for step in self.steps:
            if step.name in state:
                step.check_state(state[step.name])

    def __call__(self, batch: Batch, state: State | None = None) -> Result:
        """Compute the advantages of one batch. `state` is not modified."""
        if self.weights is not None:
            batch = batch.with_weights(self.weights)
        states = {**self.init(), **(state or {})}
        new_states: dict[str, Any] = {}
        metrics: Metrics = {}
        contributions = total = None
        values = batch.returns
        for step, result in self.results(batch, states):
            if step.sums:
                contributions = step.contributions(values, batch)
                total = None if contributions is None else result.values[:, 0]
            values = result.values
            metrics |= result.metrics
            if result.state is not None:
                new_states[step.name] = result.state
            elif step.name in states:
                raise ConfigurationError(
                    f"The step {step.name!r} has a state but returns none. Return StepResult(values, state=...) with "
                    "the state for the next batch."
                )
        if values.shape[1] != 1 or not self.steps:
            raise ConfigurationError(
                f"A chain must end with one value per trajectory, but the steps {[step.name for step in self.steps]} "
                f"return {values.shape[1]}. Add weighted_sum, or another step that sums the rewards."
            )
        advantages = np.where(np.isnan(values), 0.0, values)[:, 0]
        return Result(advantages, new_states, metrics, contributions, total)

    def results(self, batch: Batch, states: State) -> Iterator[tuple[Step, StepResult]]:
        """Apply the steps one after the other to the returns of a batch, and yield each step with its result."""
        values = batch.returns
        for step in self.steps:
            result = apply_step(step, values, batch, states.get(step.name))
            yield step, result
            values = result.values


def apply_step(step: Step, values: Array, batch: Batch, state: Any) -> StepResult:
    """Apply one step of a chain. Raise if the step does not fit the batch or returns a wrong shape."""
    segments, columns = values.shape
    if step.not_with_rubrics and batch.criterion_weights is not None and columns > 1:
        rubrics = {key for key, name in zip(batch.reward_of_column, batch.keys, strict=True) if key != name}
        raise ConfigurationError(
            f"The step {step.name!r} does not support rubrics, because {step.not_with_rubrics}. Use an "
            f"estimator without this step, or remove {listed(rubrics)} from algorithm.rewards.keys and "
            "algorithm.rewards.rubrics."
        )
    result = step.transform(values, batch, state)
    expected_shape = (segments, 1 if step.sums else columns)
    if not isinstance(result.values, np.ndarray) or result.values.shape != expected_shape:
        raise ConfigurationError(
            f"The step {step.name!r} returns {type(result.values).__name__} {getattr(result.values, 'shape', '')}, "
            f"expected an array of shape {expected_shape}. Return one value for each value that the step gets."
        )
    if step.centers or step.compares:
        # A group that had zero variance before the step must be exactly 0 after it. A later division would otherwise
        # amplify the rounding noise of the group.
        varies = batch.groups.broadcast(batch.groups.varies(values))
        is_kept = varies | np.isnan(result.values)
        result = replace(result, values=np.where(is_kept, result.values, 0.0))
    return result


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
