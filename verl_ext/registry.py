"""The estimators by name: those of this package, and those of other packages.

To add one to this package: a file in `verl_ext/estimators/` and a line in `BUILT_IN`. Another package registers its
own in the entry-point group `verl_ext.estimators`. Each name maps to `module:function`, a function from `Settings` to
`Chain`. It is imported on first use, because every process of a run reads this list.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, TypeVar

from verl_ext.errors import Complaint, ConfigurationError, unknown

BUILT_IN = {
    "compose": "verl_ext.estimators.compose:compose",
    "dgpo": "verl_ext.estimators.dgpo:dgpo",
    "drgrpo": "verl_ext.estimators.drgrpo:drgrpo",
    "gd2po": "verl_ext.estimators.gd2po:gd2po",
    "gdpo": "verl_ext.estimators.gdpo:gdpo",
    "hadw": "verl_ext.estimators.hadw:hadw",
    "maxrl": "verl_ext.estimators.maxrl:maxrl",
}
GROUP = "verl_ext.estimators"
"""The entry-point group in which other packages register their estimators."""
TAKEN = frozenset({"gae", "grpo", *BUILT_IN})
"""Names that other packages cannot use: verl computes `gae` and `grpo` without a look into its registry."""
F = TypeVar("F", bound=Callable[..., Any])


ENTRY_POINTS = {entry.name: entry.value for entry in entry_points(group=GROUP)}
"""What installed packages register, by name."""
ESTIMATORS: Mapping[str, str] = dict(
    sorted([*BUILT_IN.items(), *((name, value) for name, value in ENTRY_POINTS.items() if name not in TAKEN)])
)
"""Name to `module:function`."""


def refused(name: str) -> str | None:
    """The entry point of another package with a name that it cannot use, or None."""
    return ENTRY_POINTS.get(name) if name in TAKEN else None


@dataclass(frozen=True, kw_only=True)
class estimator:  # noqa: N801 - it decorates
    """Declare what an estimator has besides its steps: `@estimator(section=...)` before its function."""

    section: type[Any] | None = None
    """The dataclass of its settings, which are under `algorithm.<name>`."""
    check: Callable[[Any, Callable[[str], Any]], Iterable[Complaint]] = lambda _settings, _select: ()
    """Its rule about verl's configuration: from `Settings` and a function that reads an entry, or None."""
    also: Callable[[Any], Sequence[str]] = lambda _settings: ()
    """From `Settings`: names of other estimators whose settings and rules apply too, such as the base of `hadw`."""

    def __call__(self, function: F) -> F:
        """Attach the declaration to the function."""
        setattr(function, _DECLARED, self)
        return function


_DECLARED = "__verl_ext_estimator__"


def load(name: str) -> Callable[[Any], Any]:
    """Import the function of an estimator, from `Settings` to `Chain`."""
    if name not in ESTIMATORS:
        raise ConfigurationError(unknown("estimator", name, ESTIMATORS))
    module, _, function = ESTIMATORS[name].partition(":")
    try:
        loaded: Callable[[Any], Any] = getattr(importlib.import_module(module), function)
    except Exception as error:  # a module of another package may raise anything
        raise ConfigurationError(
            f"the estimator {name!r} cannot be loaded from {ESTIMATORS[name]}: {type(error).__name__}: {error}; "
            f"install its package again, or remove its entry point in the group {GROUP}"
        ) from error
    return loaded


def declaration(name: str) -> estimator:
    """The declaration of an estimator; an empty one for a function without `@estimator`."""
    declared: estimator = getattr(load(name), _DECLARED, estimator())
    return declared
