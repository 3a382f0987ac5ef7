"""Custom steps, as a user would write them outside the package."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from verl_ext import Step, StepResult, bounded


@dataclass(frozen=True)
class Clip(Step):
    """`x` between -limit and limit."""

    name: ClassVar[str] = "clip"
    limit: float = bounded(1.0, above=0.0)

    def apply(self, values, batch):
        return np.clip(values, -self.limit, self.limit)


class BySource(Step):
    """Double the values of the data source `letters`."""

    name = "by_source"
    needs_fields = ("data_source",)

    def apply(self, values, batch):
        factors = [2.0 if source == "letters" else 1.0 for source in batch.field("data_source")]
        return values * np.array(factors)[:, None]


class AddToolRewards(Step):
    """Add the rewards of the tools, a list per response."""

    name = "add_tool_rewards"
    needs_fields = ("tool_rewards",)

    def apply(self, values, batch):
        sums = [sum(rewards) for rewards in batch.field("tool_rewards")]
        return values + np.array(sums)[:, None]


class Middle(Step):
    """Subtract the mean of the group."""

    name = "middle"
    centers = True

    def apply(self, values, batch):
        return values - batch.groups.broadcast(batch.groups.mean(values))


class Halved(Step):
    """Halve values. The step declares that it needs centered values."""

    name = "halved"
    needs_centered = True

    def apply(self, values, batch):
        return values / 2


class Broken(Step):
    """Raise a KeyError."""

    name = "broken"

    def apply(self, values, batch):
        return {}["hard"]


class Slower(Step):
    """Divide by the number of batches so far."""

    name = "slower"

    def init(self):
        return {"batches": 0}

    def transform(self, values, batch, state):
        seen = state["batches"] + 1
        return StepResult(values / seen, state={"batches": seen}, metrics={"batches": seen})


class Pair(Slower):
    """Return a state that JSON cannot represent exactly, because it has a tuple."""

    name = "pair"

    def transform(self, values, batch, state):
        return StepResult(values, state={"last": (1, 2)})


class ByLength(Slower):
    """Return a state whose key is no text if a batch has four responses. A synthetic batch has more."""

    name = "by_length"

    def transform(self, values, batch, state):
        return StepResult(values, state={len(values) if len(values) == 4 else "more": 1})


class Least(Step):
    """Take the minimum of the rewards, without declaring that it combines them."""

    name = "least"

    def apply(self, values, batch):
        return values.min(axis=1, keepdims=True)


class Lowest(Least):
    """Take the minimum of the rewards instead of their sum."""

    name = "lowest"
    sums = True


class Signs(Step):
    """Ignore the sum and therefore the weights."""

    name = "signs"

    def apply(self, values, batch):
        return batch.rewards[:, :1] - 0.5


class HalveSecond(Step):
    """Halve the second of two rewards. Any other number of rewards is an error."""

    name = "halve_second"

    def apply(self, values, batch):
        first, second = values.T
        return np.stack([first, second / 2], axis=1)


class Infinite(Step):
    """Set the first value to infinity."""

    name = "infinite"

    def apply(self, values, batch):
        return np.where(np.arange(len(values))[:, None] == 0, np.inf, values)


class Nameless(Step):
    """A step without a name."""
