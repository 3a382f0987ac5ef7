"""Steps of a user's own, which lists of the cases name."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_ext import Step


@dataclass(frozen=True)
class BySource(Step):
    """Add 1 to the values of the responses whose data source is `digits`."""

    name = "by_source"
    needs_fields = ("data_source",)

    def apply(self, values: Any, batch: Any) -> Any:
        added = [float(source == "digits") for source in batch.field("data_source")]
        return values + np.array(added)[:, None]


@dataclass(frozen=True)
class Halve(Step):
    """Halve the values."""

    name = "halve"

    def apply(self, values: Any, batch: Any) -> Any:
        return values / 2
