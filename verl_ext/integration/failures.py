"""An end to failing for ever, and a word when nothing comes.

verl's asynchronous samplers replace a prompt whose responses failed by the next one. When a reward worker has died, or
the reward function raises for everything, they do so without end: thousands of prompts a minute, and no step. And for a
response that never comes, because the reward function hangs or a tool does not answer, verl waits without a word.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from verl_ext.errors import RolloutError
from verl_ext.integration import contract
from verl_ext.integration.attach import run_of
from verl_ext.integration.group_filter import BUFFER

logger = logging.getLogger("verl_ext")

FEWEST = 32
QUIET = 300.0
"""Seconds without a new response after which the log says so; again after twice, four times as many, ..."""


def wrap_build(original: Callable[..., Any]) -> Callable[..., Any]:
    """`PPOTrainer._build_replay_buffer(self)`, with a limit to failures in a row for our estimators."""

    def _build_replay_buffer(self: Any, *args: Any, **kwargs: Any) -> Any:
        buffer, run = original(self, *args, **kwargs), run_of(self)
        # A sampler of the user's may have another shape, and its own rules.
        if run is not None and run.ours and hasattr(buffer, "_evict_terminal_groups"):
            limit(buffer, max(FEWEST, 2 * self.config.data.train_batch_size))
            watch(buffer)
        return buffer

    return _build_replay_buffer


def limit(buffer: Any, most: int) -> None:
    """Let a replay buffer replace up to `most` failed prompts in a row."""
    evict = buffer._evict_terminal_groups
    contract.require_members(BUFFER, "ReplayBuffer", type(buffer), evict.__name__)
    seen: set[str] = set()
    failed = 0

    def evict_and_count(global_steps: int, partition_id: str, eviction_reasons: Any) -> Any:
        nonlocal failed
        if partition_id != "val":
            finished = set(buffer.finished_keys[partition_id])
            if finished - seen:
                failed = 0
            seen.clear()
            seen.update(finished)
            failed += len(eviction_reasons[2])
            if failed >= most:
                raise RolloutError(
                    f"step {global_steps}: the last {failed} prompts all failed, and verl would replace failing ones "
                    "for ever. The reason stands in the log after 'Error in _run_prompt': a reward function that "
                    "raises, or a worker of the rewards or the rollout that died. Resume from the last checkpoint when "
                    "it is mended"
                )
        return evict(global_steps, partition_id, eviction_reasons)

    buffer._evict_terminal_groups = evict_and_count


def watch(buffer: Any, clock: Callable[[], float] = time.monotonic) -> None:
    """Have a replay buffer say that it waits, and for what, when no response has come for long."""
    wait = buffer._wait_for_next_poll
    contract.require_members(BUFFER, "ReplayBuffer", type(buffer), wait.__name__)
    before: Any = None
    since = due = 0.0

    def wait_and_say(partition_id: str, last_debug_time: float) -> Any:
        nonlocal before, since, due
        states = {
            "pending": buffer.pending_keys[partition_id],
            "running": buffer.running_keys[partition_id],
            "finished": buffer.finished_keys[partition_id],
            "failed": buffer.failure_keys[partition_id],
        }
        # Responses of a prompt which is not finished are listed as well.
        now = clock(), (partition_id, len(buffer.partitions[partition_id]), *map(frozenset, states.values()))
        if now[1] != before:
            before, since, due = now[1], now[0], now[0] + QUIET
        elif now[0] >= due:
            due = since + 2 * (due - since)
            logger.warning(
                "no response has come for %.0f s (partition %s: %s prompts). A reward function that hangs looks like "
                "this, or a tool that does not answer: `py-spy dump --pid` of the ray::RewardLoopWorker and "
                "ray::AgentLoopWorker processes shows where. verl waits on",
                now[0] - since,
                partition_id,
                ", ".join(f"{len(keys)} {state}" for state, keys in states.items()),
            )
        return wait(partition_id, last_debug_time)

    buffer._wait_for_next_poll = wait_and_say
