"""Find the workers of a trainer that have died.

verl trains on the responses of the remaining workers. That step differs from the same step without the failure, and a
resumed run would start from its checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import ActorDiedError

from verl_ext.errors import RolloutError

PATIENCE = 5.0
"""Seconds to wait for the workers' answers. A busy worker does not answer, but it is not dead."""


def require_alive(trainer: Any, why: str) -> None:
    """Raise if a worker has died, and name it; `why` is the reason for this check."""
    if names := dead(dict(workers(trainer))):
        raise RolloutError(
            f"{why}, and {', '.join(names)} died: this step is not trained, because it would lack their responses. "
            "The reason is in this log or in the log of the node: most often out of memory. Resume from the last "
            "checkpoint (trainer.resume_mode=auto)"
        )


def workers(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Name and handle of each worker that makes responses or their rewards."""
    managers = {
        "reward worker": ("reward_loop_manager", "reward_loop_workers"),
        "agent loop worker": ("agent_loop_manager", "agent_loop_workers"),
        "rollout server": ("llm_server_manager", "server_handles"),
        "standalone rollout server": ("standalone_server_manager", "server_handles"),
    }
    for name, (manager, handles) in managers.items():
        # Each trainer has only some of these managers.
        for number, handle in enumerate(getattr(getattr(trainer, manager, None), handles, None) or ()):
            yield f"{name} {number}", handle


def dead(handles: dict[str, Any], patience: float = PATIENCE) -> list[str]:
    """The names of the workers that have died."""
    asked = {handle.__ray_ready__.remote(): name for name, handle in handles.items()}
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=patience) if asked else ([], [])
    return [asked[answer] for answer in answered if _has_died(answer)]


def _has_died(answer: Any) -> bool:
    try:
        ray.get(answer)
    except ActorDiedError:
        return True
    return False
