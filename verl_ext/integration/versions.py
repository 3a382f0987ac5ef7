"""The versions of verl that this package is tested with, and what differs between them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

OLDEST = "0.9.0"
"""The first version with plugins."""

SELF_AGGREGATING: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "0.9.0": frozenset({"sapo", "geo_mean", "gspo"}),
        "0.9.1": frozenset({"sapo", "geo_mean"}),
    }
)
"""The policy losses of each tested version that take their mean in their own way, whatever `loss_agg_mode` says."""

TESTED = tuple(SELF_AGGREGATING)
