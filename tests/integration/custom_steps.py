"""Steps as a user would write them, outside the package."""

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
    """Twice as much for the data source `letters`."""

    name = "by_source"
    needs_fields = ("data_source",)

    def apply(self, values, batch):
        return values * np.array([[2.0 if source == "letters" else 1.0] for source in batch.field("data_source")])


class AddToolRewards(Step):
    """Plus what the tools gave, a list a response."""

    name = "add_tool_rewards"
    needs_fields = ("tool_rewards",)

    def apply(self, values, batch):
        return values + np.array([[sum(rewards)] for rewards in batch.field("tool_rewards")])


class Middle(Step):
    """`x` less the mean of its group."""

    name = "middle"
    centers = True

    def apply(self, values, batch):
        return values - batch.groups.broadcast(batch.groups.mean(values))


class Halved(Step):
    """It says that it needs centered values."""

    name = "halved"
    needs_centered = True

    def apply(self, values, batch):
        return values / 2


class Broken(Step):
    name = "broken"

    def apply(self, values, batch):
        return {}["hard"]


class Slower(Step):
    """Divides by the number of batches so far."""

    name = "slower"

    def init(self):
        return {"batches": 0}

    def transform(self, values, batch, state):
        seen = state["batches"] + 1
        return StepResult(values / seen, state={"batches": seen}, metrics={"batches": seen})


class Pair(Slower):
    name = "pair"

    def transform(self, values, batch, state):
        return StepResult(values, state={"last": (1, 2)})


class ByLength(Slower):
    """Its state is in order on the made-up batch, which has more than four responses."""

    name = "by_length"

    def transform(self, values, batch, state):
        return StepResult(values, state={len(values) if len(values) == 4 else "more": 1})


class Least(Step):
    """Combines the rewards itself."""

    name = "least"

    def apply(self, values, batch):
        return values.min(axis=1, keepdims=True)


class Lowest(Least):
    """It stands in the place of a sum."""

    name = "lowest"
    sums = True


class Signs(Step):
    """The weights are lost in it: it does not use the sum."""

    name = "signs"

    def apply(self, values, batch):
        return batch.rewards[:, :1] - 0.5


class HalveSecond(Step):
    """It is written for two rewards: any other number of rewards is an error."""

    name = "halve_second"

    def apply(self, values, batch):
        first, second = values.T
        return np.stack([first, second / 2], axis=1)


class Infinite(Step):
    name = "infinite"

    def apply(self, values, batch):
        return np.where(np.arange(len(values))[:, None] == 0, np.inf, values)


class Nameless(Step):
    pass
