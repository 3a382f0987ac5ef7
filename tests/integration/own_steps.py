"""Steps as a user would write them, outside the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from verl_ext.core.chain import Step


@dataclass(frozen=True)
class Clip(Step):
    """`x` between -limit and limit."""

    name: ClassVar[str] = "clip"
    limit: float = 1.0

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
    centres = True

    def apply(self, values, batch):
        return values - batch.groups.broadcast(batch.groups.mean(values))


class Broken(Step):
    name = "broken"

    def apply(self, values, batch):
        return {}["hard"]
