"""The hooks by which this package enters verl, and the rules that plugins add to those of the start-up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from verl_ext.errors import Complaint
from verl_ext.integration.compat.hooks import MARK, Hook, require, schedule, unwrapped, wrap
from verl_ext.integration.compat.imports import after_import

__all__ = ["MARK", "RULES", "Hook", "after_import", "require", "schedule", "unwrapped", "wrap"]

RULES: list[Callable[[Any], Iterable[Complaint]]] = []
"""Rules of plugins about a run's configuration."""
