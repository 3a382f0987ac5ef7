"""Advantage estimators and multi-reward scores for verl.

Importing this package imports neither verl nor ray nor torch: every name below is loaded on first use.

- An estimator in code of your own: `build(name, Settings.parse({...}))(Batch.of(...), state)`, whose result has the
  advantages and the state for the next batch.
- A step of your own: a frozen dataclass over `Step` with `apply`, or with `transform` that returns a `StepResult`;
  `bounded` declares a number with limits. A named estimator is a `Method`.
"""

import importlib
import sys
from typing import Any

__version__ = "0.3.0"
"""The version of the package."""

_NAMES = {
    "verl_ext.core.batch": ("Batch",),
    "verl_ext.core.chain": ("Chain", "Step", "StepResult"),
    "verl_ext.core.rubrics": ("rubric",),
    "verl_ext.core.steps": ("Center", "ScaleByMad", "ScaleByStd", "WeightedSum", "Whiten"),
    "verl_ext.core.post_sum": ("Balance", "WeightByDifficulty", "WeightByHistory"),
    "verl_ext.core.turns": ("Turns", "per_turn"),
    "verl_ext.core.schema": ("bounded",),
    "verl_ext.errors": (
        "CheckpointError",
        "Finding",
        "ConfigurationError",
        "DataError",
        "IntegrationError",
        "VerlExtError",
    ),
    "verl_ext.methods.method": ("Method",),
    "verl_ext.registry": ("ESTIMATORS", "build"),
    "verl_ext.settings": ("Settings",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        message = f"module 'verl_ext' has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=sys.modules[__name__])  # with these, Python suggests a name
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
