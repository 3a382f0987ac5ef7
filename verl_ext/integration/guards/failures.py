"""An end to failing for ever, and a word when nothing comes.

verl's asynchronous samplers replace a prompt whose responses failed by the next one. When a reward worker has died, or
the reward function raises for everything, they do so without end: thousands of prompts a minute, and no step. And for a
response that never comes, because the reward function hangs or a tool does not answer, verl waits without a word. The
fully asynchronous trainer ends at the first response that fails, as if it had reached its last step.
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
from verl_ext.integration.guards import workers
from verl_ext.integration.trainers.dynamic_sampling import BUFFER
from verl_ext.integration.trainers.run import estimator_name, run_of

logger = logging.getLogger("verl_ext")

ENDED_BY = "_verl_ext_ended_by"
GUARDED = "_verl_ext_guarded"
FEWEST = 32
ASK_EVERY = 10.0
"""Seconds from one question for dead workers to the next."""
QUIET = 300.0
"""Seconds without a new response after which the log says so; again after twice, four times as many, ..."""


def wrap_build(original: Callable[..., Any]) -> Callable[..., Any]:
    """`PPOTrainer._build_replay_buffer(self)`, with a limit to failures in a row for our estimators."""

    def _build_replay_buffer(self: Any, *args: Any, **kwargs: Any) -> Any:
        buffer, run = original(self, *args, **kwargs), run_of(self)
        if run is not None and run.ours and not hasattr(buffer, GUARDED):  # a subclass that calls `super` comes twice
            guard(buffer, self)
        return buffer

    return _build_replay_buffer


def guard(buffer: Any, trainer: Any) -> None:
    """Limit a replay buffer's failures, and have it say that it waits."""
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    setattr(buffer, GUARDED, True)
    if not isinstance(buffer, ReplayBuffer):  # it has its own rules
        logger.warning(
            "%s.%s is no ReplayBuffer of verl's: prompts that all fail, and responses that never come, are not watched",
            type(buffer).__module__,
            type(buffer).__qualname__,
        )
        return
    contract.require_members(BUFFER, "ReplayBuffer", type(buffer), "_evict_terminal_groups", "_wait_for_next_poll")
    limit(buffer, max(FEWEST, 2 * trainer.config.data.train_batch_size), trainer)
    watch(buffer)


def limit(buffer: Any, most: int, trainer: Any = None) -> None:
    """Let a replay buffer replace up to `most` failed prompts in a row, and none for a worker that has died."""
    evict = buffer._evict_terminal_groups
    seen: set[str] = set()
    failed = 0
    asked = -math.inf

    def evict_and_count(global_steps: int, partition_id: str, eviction_reasons: Any) -> Any:
        nonlocal failed, asked
        if partition_id != "val":
            finished, new = set(buffer.finished_keys[partition_id]), len(eviction_reasons[2])
            # In what order the prompts of one look at the buffer came, nobody knows.
            failed = 0 if finished - seen else failed + new
            seen.clear()
            seen.update(finished)
            if new and time.monotonic() - asked > ASK_EVERY:
                asked = time.monotonic()
                workers.require_alive(trainer, f"step {global_steps}: {new} prompts failed")
            if failed >= most:
                raise RolloutError(
                    f"step {global_steps}: the last {failed} prompts all failed, and verl would replace failing ones "
                    "for ever. The reason stands in the log after 'Error in _run_prompt': most often a reward function "
                    "that raises. Resume from the last checkpoint when it is mended"
                )
        return evict(global_steps, partition_id, eviction_reasons)

    buffer._evict_terminal_groups = evict_and_count


def watch(buffer: Any, clock: Callable[[], float] = time.monotonic) -> None:
    """Have a replay buffer say that it waits, and for what, when no response has come for long."""
    wait = buffer._wait_for_next_poll
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


def install_rollouter(fully_async: ModuleType) -> None:
    """`FullyAsyncRollouter`, a Ray actor: what ends its generation ends the run with an error."""
    contract.require("verl.experimental.fully_async_policy.fully_async_rollouter", fully_async)
    cls = fully_async.FullyAsyncRollouter.__ray_metadata__.modified_class
    hooks.wrap(cls, "_streaming_generation_main", wrap_generation)
    hooks.wrap(cls, "fit", wrap_rollouter_fit)


def wrap_generation(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_streaming_generation_main(self)`, which verl awaits without a look at its exception."""

    async def _streaming_generation_main(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await original(self, *args, **kwargs)
        except Exception as error:
            setattr(self, ENDED_BY, error)
            raise

    return _streaming_generation_main


def wrap_rollouter_fit(original: Callable[..., Any]) -> Callable[..., Any]:
    """`FullyAsyncRollouter.fit(self)`: verl would end as if the training had reached its last step."""

    async def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = await original(self, *args, **kwargs)
        error = getattr(self, ENDED_BY, None)
        if error is not None and estimator_name(self.config) in ESTIMATORS:
            raise RolloutError(
                f"the rollout ended before its last prompt: {type(error).__name__}: {error}. Resume from the last "
                "checkpoint when it is mended"
            ) from error
        return result

    return fit
