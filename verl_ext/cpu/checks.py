"""Find out whether a run is meant for the CPU, and complain about what cannot run there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from verl_ext.errors import Complaint, listed

ROLLOUT = "actor_rollout_ref.rollout"


def asks_for_cpu(config: Any) -> bool:
    """Whether this run trains on the CPU: see `verl_ext.cpu.plugin`."""
    if "actor_rollout_ref" not in config:  # another program of verl, for example supervised training
        return False
    return "cpu" in (_platform(os.environ), _platform(_environment(config)))


def _platform(variables: Any) -> str:
    return str(variables.get("VERL_PLATFORM", "")).strip().lower()


def _environment(config: Any) -> Any:
    """The environment variables of Ray's workers."""
    return OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}


def complaints(config: Any) -> Iterator[Complaint]:
    """Complain about what cannot run without an accelerator."""
    for path, (valid, reason) in _required(config).items():
        value = OmegaConf.select(config, path)
        if value not in valid:
            yield Complaint(
                f"{path} is {value!r}, but {reason}; valid on the CPU: {listed(valid)}; set ++{path}={valid[0]}"
            )


def _models(config: Any) -> Iterator[tuple[str, str]]:
    """The engine and the model, by their paths in the configuration, of each model that this run trains or asks."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    yield "actor_rollout_ref.actor", "actor_rollout_ref.model"
    if need_reference_policy(config):
        yield "actor_rollout_ref.ref", "actor_rollout_ref.model"
    if need_critic(config):
        yield "critic", "critic.model"


def _required(config: Any) -> dict[str, tuple[tuple[Any, ...], str]]:
    """Settings of which only one value, or few, work on the CPU: these values, and why."""
    rows: dict[str, tuple[tuple[Any, ...], str]] = {
        f"{ROLLOUT}.name": (("embedded",), "other rollouts need a GPU"),
        # The rollout returns log-probabilities of the distribution that it samples from.
        f"{ROLLOUT}.logprobs_mode": (("processed_logprobs",), "the embedded rollout has no other mode"),
        f"{ROLLOUT}.tensor_model_parallel_size": ((1,), "a replica of the embedded rollout is one process"),
    }
    for engine, model in _models(config):
        attention = f"{model}.override_config.attn_implementation"
        rows[f"{engine}.strategy"] = ("fsdp2",), "other engines refuse parameters on the CPU"
        rows[attention] = ("sdpa", "eager"), "flash attention needs a GPU"
        rows[f"{model}.use_remove_padding"] = (False,), "flash attention needs a GPU"
    return rows
