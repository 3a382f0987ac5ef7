"""Steps as a user would write them, outside the package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from verl_ext.core.steps import Stateless


@dataclass(frozen=True)
class Clip(Stateless):
    """`x` between -limit and limit."""

    name: ClassVar[str] = "clip"
    limit: float = 1.0

    def apply(self, values, batch):
        return np.clip(values, -self.limit, self.limit)


class Broken(Stateless):
    name = "broken"

    def apply(self, values, batch):
        return {}["hard"]
