"""The step that leaves out responses whose rewards pull in different directions."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np

from verl_ext.core.batch import Batch
from verl_ext.core.chain import SUM, Order, Step, Update
from verl_ext.core.groups import Array, Bools
from verl_ext.core.typed import limited
from verl_ext.errors import ConfigurationError, listed

# A value this near to 0 has no sign.
SMALLEST = 1e-8


@dataclass(frozen=True)
class DropConflicts(Step):
    """Leave out the responses whose `w_k x_k` conflict; multiply the others by the share of their group that is kept.

    A response conflicts if one `w_k x_k` is above 1e-8 and another below -1e-8. `conflict=hard` drops every such
    response, `conflict=snr` those with `|sum_k w_k x_k| / (sum_k |w_k x_k| + 1e-8) < tau` (GD2PO). From here on a
    dropped response is not scored: whitening leaves it out, and its advantage is 0. A reward that has weight 0 or is
    not scored has no part in a conflict. `conflict_share` and `dropped_share` are shares of the scored responses.
    """

    name: ClassVar[str] = "drop_conflicts"
    after: ClassVar[Order] = MappingProxyType({"centre": "only centred values say which way a reward pulls"})
    not_after: ClassVar[Order] = MappingProxyType(
        {SUM: "it compares the rewards of a response", "drop_conflicts": "the share would count twice"}
    )
    conflict: Literal["hard", "snr"] = "hard"
    tau: float = limited(0.2, low=0.0, high=1.0)
    weights: tuple[float, ...] | None = None
    """One per component; default: 1 each."""

    def __post_init__(self) -> None:
        if self.conflict == "hard" and self.tau != DropConflicts.tau:
            raise ConfigurationError(
                f"{self.name}: tau={self.tau:g} has no effect with conflict=hard: set conflict=snr, or remove tau"
            )

    def update(self, values: Array, batch: Batch, state: Any) -> Update:
        weights = np.ones(len(batch.keys)) if self.weights is None else np.array(self.weights)
        if values.shape[1] != len(weights):
            raise ConfigurationError(
                f"{self.name} needs a weight for each reward, found {len(weights)} for {listed(batch.keys)}"
            )
        scored = ~np.isnan(values).all(axis=1)
        parts = np.where(np.isnan(values), 0.0, values * weights)
        conflict: Bools = np.logical_and((parts > SMALLEST).any(axis=1), (parts < -SMALLEST).any(axis=1))
        dropped = conflict
        if self.conflict == "snr":
            ratio = np.abs(parts.sum(axis=1)) / (np.abs(parts).sum(axis=1) + SMALLEST)
            dropped = conflict & (ratio < self.tau)
        kept = batch.groups.mean(np.where(scored, ~dropped, np.nan))
        out = np.where(dropped[:, None], np.nan, values * batch.groups.broadcast(kept)[:, None])
        shares = {"conflict_share": conflict, "dropped_share": dropped}
        return Update(out, metrics={name: float(rows[scored].mean()) for name, rows in shares.items() if scored.any()})
