"""verl's reward managers: what each adds to the result of the reward function, and what it reads and needs.

A reward manager calls the reward function in verl. This file needs nothing else of verl_ext.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

MANAGER = "reward.reward_manager"
MANAGER_ARGUMENTS = "reward.reward_kwargs"
OVERLONG_REWARD = "overlong_reward"
"""The component with the penalty of dapo's reward manager, if `log` is set."""


class RewardManager(NamedTuple):
    """A reward manager of verl."""

    components: tuple[str, ...] = ()
    """The components that it adds to those of the reward function."""
    arguments: tuple[str, ...] = ()
    """The entries of `reward.reward_kwargs` that it reads."""
    needs_service: bool = False
    """Whether it needs Ray or a service. `check` then lets `naive` call the reward function."""


REWARD_MANAGERS: Mapping[str, RewardManager] = {
    "naive": RewardManager(),
    "gdpo": RewardManager(),
    "dapo": RewardManager(
        components=("overlong", OVERLONG_REWARD),
        arguments=(
            "max_resp_len",
            *(f"overlong_buffer_cfg.{name}" for name in ("enable", "len", "penalty_factor", "log")),
        ),
    ),
    "rate_limited": RewardManager(needs_service=True),
    "remote": RewardManager(needs_service=True),
}
"""The reward managers of verl, by the names under which verl registers them."""


def manager_of_verl(select: Callable[[str], Any]) -> RewardManager | None:
    """Return the reward manager of a run; None if it is not one of `REWARD_MANAGERS`, and may do anything.

    `select` returns an entry of the configuration. A manager from a file is a custom one, whatever its name is.
    """
    source = select(f"{MANAGER}.source") or "register"
    if source != "register":
        return None
    return REWARD_MANAGERS.get(select(f"{MANAGER}.name") or "naive")
