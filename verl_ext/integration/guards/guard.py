"""The guards, which protect a run and fail open.

A guard stops a run only by an error that it raises on purpose ("another run saves here"). If this verl, this Ray or
this file system lacks what a guard needs, that guard is turned off with one warning, and training goes on. Each has a
switch under `algorithm.verl_ext`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_ext.errors import CheckpointError, ClusterError, ConfigurationError, RolloutError
from verl_ext.settings import VerlExtSettings

logger = logging.getLogger("verl_ext")

VERDICTS = (CheckpointError, ClusterError, ConfigurationError, RolloutError)
"""The errors that a guard raises on purpose, to stop a run."""


@dataclass(frozen=True)
class Guard:
    """One guard."""

    switch: str
    """The setting under `algorithm.verl_ext` that turns it off."""
    protects: str
    """What it does, for the warning and the docs."""
    patches: tuple[str, ...] = ()
    """Dotted names of what it wraps in verl or Ray; empty if it wraps nothing."""


GUARDS = (
    Guard(
        "check_nodes",
        "checks before training that every node of the Ray cluster has the driver's versions of this package and verl",
        ("ray.init",),
    ),
    Guard("lock_folders", "stops a second run in the same default_local_dir or dump_dir"),
    Guard(
        "repair_tracker",
        "on resume, repairs a latest_checkpointed_iteration.txt that a killed run left empty",
    ),
    Guard(
        "watch_rollouts",
        "stops a run whose prompts keep failing or whose workers died; warns when no response comes",
        (
            "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer._evict_terminal_groups",
            "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer._wait_for_next_poll",
            "verl.experimental.fully_async_policy.fully_async_rollouter.FullyAsyncRollouter._streaming_generation_main",
            "verl.experimental.fully_async_policy.fully_async_rollouter.FullyAsyncRollouter.fit",
        ),
    ),
)
_off: set[str] = set()


def attempt(switch: str, settings: VerlExtSettings, action: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run a guard if it is on. Raise its verdicts; any other error turns it off with one warning."""
    if not getattr(settings, switch, True) or switch in _off:
        return
    try:
        action(*args, **kwargs)
    except VERDICTS:
        raise
    except Exception as error:  # noqa: BLE001 - a broken guard must not end a run
        turn_off(switch, error)


def turn_off(switch: str, error: BaseException) -> None:
    """Turn a guard off in this process, with one warning."""
    if switch not in _off:
        _off.add(switch)
        guard = next(guard for guard in GUARDS if guard.switch == switch)
        logger.warning(
            "the guard %s failed and is now off (%s: %s). When on, it %s. Training goes on; set "
            "algorithm.verl_ext.%s=False to turn it off without this warning",
            switch,
            type(error).__name__,
            error,
            guard.protects,
            switch,
        )
