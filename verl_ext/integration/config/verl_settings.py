"""Check verl's settings that we read, and Ray's environment variables: a wrong one would end the run late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal

from omegaconf import OmegaConf

from verl_ext.core.typed import value_of
from verl_ext.errors import ConfigurationError
from verl_ext.integration.config.read import has, select

ACTOR = "actor_rollout_ref.actor"
VARIABLES = "ray_kwargs.ray_init.runtime_env.env_vars"

ResumeMode = Literal["auto", "disable", "resume_path"]

# Entries of verl's configuration that this package reads, and those that verl reads as numbers only in the training,
# with the types in verl's own files.
KINDS: Mapping[str, Any] = MappingProxyType(
    {
        f"{ACTOR}.policy_loss.loss_mode": str,
        f"{ACTOR}.ppo_mini_batch_size": int,
        f"{ACTOR}.use_kl_loss": bool,
        "actor_rollout_ref.rollout.n": int,
        "data.max_response_length": int,
        "data.train_batch_size": int,
        "reward.custom_reward_function.name": str | None,
        "reward.custom_reward_function.path": str | None,
        "reward.reward_manager.name": str,
        "reward.reward_manager.source": str,
        "reward.reward_model.enable": bool,
        "trainer.default_local_dir": str,
        "trainer.n_gpus_per_node": int,
        "trainer.nnodes": int,
        "trainer.resume_mode": ResumeMode,
        "trainer.save_freq": int,
        "trainer.test_freq": int,
        "trainer.total_epochs": int,
        "trainer.total_training_steps": int | None,
        "trainer.use_v1": bool,
        "trainer.v1.sampler.custom_sampler.path": str | None,
    }
)


def wrong_types(config: Any) -> Iterator[str]:
    """Messages about settings of verl whose value has the wrong type."""
    for path, kind in KINDS.items():
        try:
            value = select(config, path)
            if value is not None or has(config, path):
                value_of(path, value, kind)
        except ConfigurationError as error:
            yield str(error)


def wrong_variables(config: Any) -> Iterator[str]:
    """Messages about environment variables for Ray's processes that are not text: Ray accepts only text."""
    section = select(config, VARIABLES)
    if section is None:
        return
    # verl does not resolve interpolations here, so Ray gets their text.
    variables: Any = OmegaConf.to_container(section) if OmegaConf.is_config(section) else section
    if not isinstance(variables, Mapping):
        yield f"{VARIABLES} must be a section of environment variables, found {variables!r}"
        return
    for name, value in variables.items():
        if not isinstance(name, str):
            yield f"{VARIABLES} has the name {name!r}, which is not text: write '{name}' in quotes"
        elif value is None:
            yield f"{VARIABLES}.{name} has no value, but Ray accepts only text: remove it, or write {_quoted(name, '')}"
        elif not isinstance(value, str):
            yield (
                f"{VARIABLES}.{name}={value} is {type(value).__name__}, but Ray accepts only text: write "
                f"{_quoted(name, str(value).lower() if isinstance(value, bool) else str(value))}"
            )


def _quoted(name: str, value: str) -> str:
    """How to write a value as text, on the command line and in a file."""
    return f"\"++{VARIABLES}.{name}='{value}'\" on the command line (with both quotes), {name}: '{value}' in a file"
