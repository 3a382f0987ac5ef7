"""The guards: what protects a run, and how each of them fails open.

A guard stops a run only with an error of its own verdict ("another run saves here"). Where this verl, this Ray or this
file system does not have what a guard needs, that guard is off, one warning says so, and training goes on. Each has a
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
"""Errors by which a guard stops a run on purpose."""


@dataclass(frozen=True)
class Guard:
    """One protection and its switch."""

    switch: str
    """Setting under `algorithm.verl_ext`."""
    protects: str
    """What it does, for `doctor` and the docs."""
    patches: tuple[str, ...] = ()
    """What it wraps or reads of verl, by dotted names; empty where it touches nothing of verl."""


GUARDS = (
    Guard(
        "check_nodes",
        "before training, asks every node of the Ray cluster for this package and verl in the driver's version",
        ("ray.init",),
    ),
    Guard("lock_folders", "refuses a second run in the same default_local_dir or dump_dir"),
    Guard(
        "repair_tracker",
        "on resume, repairs a latest_checkpointed_iteration.txt that a killed run left empty",
    ),
    Guard(
        "watch_rollouts",
        "ends a run whose prompts fail without end or whose workers died; warns when no response comes",
        (
            "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer._evict_terminal_groups",
            "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer._wait_for_next_poll",
            "verl.experimental.fully_async_policy.fully_async_rollouter.FullyAsyncRollouter._streaming_generation_main",
            "verl.experimental.fully_async_policy.fully_async_rollouter.FullyAsyncRollouter.fit",
        ),
    ),
)
SWITCHES = tuple(guard.switch for guard in GUARDS)
_off: set[str] = set()


def attempt(switch: str, settings: VerlExtSettings, action: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run a guard if it is switched on; pass its verdict on, and anything else turns it off with one warning."""
    if not getattr(settings, switch) or switch in _off:
        return
    try:
        action(*args, **kwargs)
    except VERDICTS:
        raise
    except Exception as error:  # noqa: BLE001 - a guard that does not work must not end a run
        turn_off(switch, error)


def turn_off(switch: str, error: BaseException) -> None:
    """Switch a guard off for this process, with one warning."""
    if switch not in _off:
        _off.add(switch)
        guard = next(guard for guard in GUARDS if guard.switch == switch)
        logger.warning(
            "the guard %s is off, because it does not work here (%s: %s): it %s. Training goes on; "
            "algorithm.verl_ext.%s=False silences this",
            switch,
            type(error).__name__,
            error,
            guard.protects,
            switch,
        )
