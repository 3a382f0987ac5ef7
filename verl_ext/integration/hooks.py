"""The hooks into verl, and the rules that judge a configuration of verl."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from verl_ext.errors import Complaint
from verl_ext.integration.compat.hooks import MARK, Hook, require, schedule, unwrapped, wrap
from verl_ext.integration.compat.imports import after_import

__all__ = ["MARK", "RULES", "Hook", "after_import", "require", "schedule", "unwrapped", "wrap"]

RULES: list[Callable[[Any], Iterable[Complaint]]] = []
"""Rules that other plugins add to those that `check` and the start of a run judge."""
