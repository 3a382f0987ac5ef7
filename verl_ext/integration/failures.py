"""An end to failing for ever.

verl's asynchronous samplers replace a prompt whose responses failed by the next one. When a reward worker has died, or
the reward function raises for everything, they do so without end: thousands of prompts a minute, and no step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_ext.errors import RolloutError
from verl_ext.integration import contract
from verl_ext.integration.attach import run_of
from verl_ext.integration.group_filter import BUFFER

FEWEST = 32


def wrap_build(original: Callable[..., Any]) -> Callable[..., Any]:
    """`PPOTrainer._build_replay_buffer(self)`, with a limit to failures in a row for our estimators."""

    def _build_replay_buffer(self: Any, *args: Any, **kwargs: Any) -> Any:
        buffer, run = original(self, *args, **kwargs), run_of(self)
        # A sampler of the user's may have another shape, and its own rules.
        if run is not None and run.ours and hasattr(buffer, "_evict_terminal_groups"):
            limit(buffer, max(FEWEST, 2 * self.config.data.train_batch_size))
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
