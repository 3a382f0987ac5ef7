"""Stop runs whose rollouts keep failing, and log a warning when no response comes.

verl's asynchronous samplers replace a prompt whose responses failed by the next one. If a reward worker has died, or
the reward function raises for every prompt, they replace thousands of prompts per minute and never finish a step. If a
response never comes, because the reward function hangs or a tool does not answer, verl waits and logs nothing. The
fully asynchronous trainer ends at the first failed response as if it had reached its last step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_ext.errors import RolloutError
from verl_ext.estimators import ESTIMATORS
from verl_ext.integration.compat import contract, hooks
from verl_ext.integration.compat.names import REPLAY_BUFFER
from verl_ext.integration.config.read import estimator_name, select
from verl_ext.integration.guards import guard, workers
from verl_ext.settings import VerlExtSettings

logger = logging.getLogger("verl_ext")

ENDED_BY = "_verl_ext_ended_by"
WATCHED = "_verl_ext_watched"
FEWEST = 32
"""The limit of failed prompts in a row is at least this."""
ASK_EVERY = 10.0
"""Seconds between two checks for dead workers."""
QUIET = 300.0
"""Seconds without a new response before the first warning; the next ones come after 2, 4, 8, ... times as many."""


def watch_buffer(buffer: Any, trainer: Any, settings: VerlExtSettings) -> None:
    """Limit a replay buffer's failures in a row, and log a warning when no response comes."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    if hasattr(buffer, WATCHED):  # a trainer's subclass that calls `super` gets here twice
        return
    setattr(buffer, WATCHED, True)
    if not isinstance(buffer, ReplayBuffer):
        logger.warning(
            "%s.%s is not verl's ReplayBuffer: prompts that keep failing and responses that never come are not "
            "detected",
            type(buffer).__module__,
            type(buffer).__qualname__,
        )
        return
    needed = ("_evict_terminal_groups", "_wait_for_next_poll")
    contract.require_members(REPLAY_BUFFER, "ReplayBuffer", type(buffer), *needed)
    limit(buffer, max(FEWEST, 2 * trainer.config.data.train_batch_size), settings, trainer)
    watch(buffer, settings)


def limit(buffer: Any, most: int, settings: VerlExtSettings, trainer: Any = None) -> None:
    """Raise when `most` prompts in a row have failed, or when a prompt failed and a worker has died."""
    evict = buffer._evict_terminal_groups
    seen: set[str] = set()
    failed = 0
    asked = -math.inf

    def count(global_steps: int, partition_id: str, eviction_reasons: Any) -> None:
        nonlocal failed, asked
        finished, new = set(buffer.finished_keys[partition_id]), len(eviction_reasons[2])
        # Completion order within a poll is unknown: one new finished prompt resets the count.
        failed = 0 if finished - seen else failed + new
        seen.clear()
        seen.update(finished)
        if new and time.monotonic() - asked > ASK_EVERY:
            asked = time.monotonic()
            workers.require_alive(trainer, f"step {global_steps}: {new} prompts failed")
        if failed >= most:
            raise RolloutError(
                f"step {global_steps}: the last {failed} prompts all failed, and verl would replace them forever. "
                "The log has the reason after 'Error in _run_prompt': most often a reward function that raises. Fix it "
                "and resume from the last checkpoint"
            )

    def evict_and_count(global_steps: int, partition_id: str, eviction_reasons: Any) -> Any:
        if partition_id != "val":
            guard.attempt("watch_rollouts", settings, count, global_steps, partition_id, eviction_reasons)
        return evict(global_steps, partition_id, eviction_reasons)

    buffer._evict_terminal_groups = evict_and_count


def watch(buffer: Any, settings: VerlExtSettings, clock: Callable[[], float] = time.monotonic) -> None:
    """Log a warning when no response has come for `QUIET` seconds, with the number of prompts in each state."""
    wait = buffer._wait_for_next_poll
    before: Any = None
    since = due = 0.0

    def warn_if_quiet(partition_id: str) -> None:
        nonlocal before, since, due
        states = {
            "pending": buffer.pending_keys[partition_id],
            "running": buffer.running_keys[partition_id],
            "finished": buffer.finished_keys[partition_id],
            "failed": buffer.failure_keys[partition_id],
        }
        now = clock()
        # The partition also holds the responses of prompts that are not finished.
        progress = (partition_id, len(buffer.partitions[partition_id]), *map(frozenset, states.values()))
        if progress != before:
            before, since, due = progress, now, now + QUIET
        elif now >= due:
            due = since + 2 * (due - since)
            logger.warning(
                "no response has come for %.0f s (partition %s: %s prompts), and verl keeps waiting. Either a reward "
                "function hangs or a tool does not answer: run `py-spy dump --pid` on the ray::RewardLoopWorker and "
                "ray::AgentLoopWorker processes to see where",
                now - since,
                partition_id,
                ", ".join(f"{len(keys)} {state}" for state, keys in states.items()),
            )

    def warn_and_wait(partition_id: str, last_debug_time: float) -> Any:
        guard.attempt("watch_rollouts", settings, warn_if_quiet, partition_id)
        return wait(partition_id, last_debug_time)

    buffer._wait_for_next_poll = warn_and_wait


def install_rollouter(fully_async: ModuleType) -> None:
    """Wrap `FullyAsyncRollouter`, a Ray actor: an error in its generation ends the run with an error."""
    contract.require("verl.experimental.fully_async_policy.fully_async_rollouter", fully_async)
    cls = fully_async.FullyAsyncRollouter.__ray_metadata__.modified_class
    hooks.wrap(cls, "_streaming_generation_main", wrap_generation)
    hooks.wrap(cls, "fit", wrap_rollouter_fit)


def wrap_generation(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_streaming_generation_main(self)`: remember its exception, which verl ignores."""

    async def _streaming_generation_main(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await original(self, *args, **kwargs)
        except Exception as error:
            setattr(self, ENDED_BY, error)
            raise

    return _streaming_generation_main


def wrap_rollouter_fit(original: Callable[..., Any]) -> Callable[..., Any]:
    """`FullyAsyncRollouter.fit(self)`: raise if generation failed; verl would end as if after its last step."""

    async def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = await original(self, *args, **kwargs)
        error = getattr(self, ENDED_BY, None)
        off = select(self.config, "algorithm.verl_ext.watch_rollouts") is False
        if error is not None and estimator_name(self.config) in ESTIMATORS and not off:
            raise RolloutError(
                f"the rollout ended before its last prompt: {type(error).__name__}: {error}. Fix this and resume from "
                "the last checkpoint"
            ) from error
        return result

    return fit
