"""Advantage estimators and multi-reward scores for verl.

Importing this package imports neither verl nor ray nor torch: every name below is loaded on first use.

`run_state()` returns the state that the estimators carry from batch to batch, `use_run_state(RunState())` puts another
one in force for a `with` block. `build` and `Settings` make an estimator without verl. `Stateless`, `Update` and
`limited` are what a step of one's own is written with.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Batch": "verl_ext.core.batch",
    "Chain": "verl_ext.core.chain",
    "ESTIMATORS": "verl_ext.estimators",
    "RunState": "verl_ext.core.state",
    "Settings": "verl_ext.settings",
    "Stateless": "verl_ext.core.steps",
    "Update": "verl_ext.core.chain",
    "build": "verl_ext.estimators",
    "limited": "verl_ext.core.typed",
    "run_state": "verl_ext.run",
    "use_run_state": "verl_ext.run",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'verl_ext' has no attribute {name!r}")
