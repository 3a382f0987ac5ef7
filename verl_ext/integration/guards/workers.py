"""Which of a trainer's workers have died.

verl trains on what the others still answer. That step is another one than that of an undisturbed run, and its
checkpoint would be the one from which the next run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import ActorDiedError

from verl_ext.errors import RolloutError

PATIENCE = 5.0
"""Seconds that workers get to answer; one that is busy does not, and is not dead."""


def require_alive(trainer: Any, why: str) -> None:
    """Refuse to go on without a worker, naming it; `why` says what made us look."""
    if found := dead(dict(workers(trainer))):
        raise RolloutError(
            f"{why}, and {', '.join(found)} died: the step is not trained, because it would not be that of an "
            "undisturbed run. The reason stands in the log, or in that of the node: out of memory, most often. Resume "
            "from the last checkpoint (trainer.resume_mode=auto)"
        )


def workers(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Handles by name of those without which responses, or their rewards, do not come."""
    managers = {
        "reward worker": ("reward_loop_manager", "reward_loop_workers"),
        "agent loop worker": ("agent_loop_manager", "agent_loop_workers"),
        "rollout server": ("llm_server_manager", "server_handles"),
        "standalone rollout server": ("standalone_server_manager", "server_handles"),
    }
    for name, (manager, handles) in managers.items():
        # Which managers there are depends on the trainer; the contract pins their attributes.
        for number, handle in enumerate(getattr(getattr(trainer, manager, None), handles, None) or ()):
            yield f"{name} {number}", handle


def dead(handles: dict[str, Any], patience: float = PATIENCE) -> list[str]:
    """The names of those that have died."""
    asked = {handle.__ray_ready__.remote(): name for name, handle in handles.items()}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=patience) if asked else ([], [])
    return [asked[answer] for answer in answered if _has_died(answer)]


def _has_died(answer: Any) -> bool:
    try:
        ray.get(answer)
    except ActorDiedError:
        return True
    return False
