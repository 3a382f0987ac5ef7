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


class Broken(Step):
    name = "broken"

    def apply(self, values, batch):
        return {}["hard"]
