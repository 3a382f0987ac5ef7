"""Check the configuration of a run, before Ray starts and when the trainer is built."""

from __future__ import annotations

from typing import Any

from verl_ext.integration.config.checks import Verdict, judge
from verl_ext.integration.config.checks import check_run as _check_run

__all__ = ["Verdict", "check_run", "judge"]


def check_run(config: Any) -> Verdict:
    """Raise one error that lists everything wrong with a configuration; log the warnings and notes."""
    _check_run(config)
    return judge(config)
