"""The versions of verl that this package is tested with, and the differences between them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

OLDEST = "0.9.0"
"""The first version with plugins."""

SELF_AGGREGATING: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "0.9.0": frozenset({"sapo", "geo_mean", "gspo"}),
        "0.9.1": frozenset({"sapo", "geo_mean"}),
    }
)
"""The policy losses of each tested version that average token losses in their own way and ignore `loss_agg_mode`."""

TESTED = tuple(SELF_AGGREGATING)


def order(version: str) -> Any:
    """A sort key for a version; what follows its numbers (rc1, .dev) does not count.

    >>> order("0.10.0.dev") > order("0.9.1") > order("0.9")
    True
    >>> order("0.9.0.dev") == order("0.9")
    True
    """
    from packaging.version import Version  # one of verl's requirements

    return Version(Version(version).base_version)
