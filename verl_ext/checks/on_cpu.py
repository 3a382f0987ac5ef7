"""Find out whether a run is meant for the CPU, and report settings that do not work there."""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from verl_ext.errors import Finding, listed
from verl_ext.run import Run
from verl_ext.run_config import ROLLOUT, select, uses_default_trainer

RAY = "ray_kwargs.ray_init"
TRAINER_MODE = "trainer.v1.trainer_mode"


class Requirement(NamedTuple):
    """A setting that must have one of some values on the CPU."""

    path: str
    valid: tuple[object, ...]
    reason: str


ROLLOUT_REQUIREMENTS = (
    Requirement(f"{ROLLOUT}.name", ("embedded",), "the other rollouts need a GPU"),
    # The rollout returns log-probabilities of the distribution that it samples from.
    Requirement(f"{ROLLOUT}.logprobs_mode", ("processed_logprobs",), "the embedded rollout has no other mode"),
    Requirement(f"{ROLLOUT}.tensor_model_parallel_size", (1,), "a replica of the embedded rollout is one process"),
)


def requirements_of_model(engine: str, model: str) -> tuple[Requirement, ...]:
    """Return what the section of an engine, such as the actor, and the section of its model must have."""
    attention = f"{model}.override_config.attn_implementation"
    return (
        Requirement(f"{engine}.strategy", ("fsdp2",), "the other engines do not accept parameters on the CPU"),
        Requirement(attention, ("sdpa", "eager"), "flash attention needs a GPU"),
        Requirement(
            f"{model}.use_remove_padding", (False,), "packed sequences need flash attention, which needs a GPU"
        ),
    )


def asks_for_cpu(config: Any) -> bool:
    """Return whether this run trains on the CPU: see `verl_ext.cpu.plugin`."""
    if "actor_rollout_ref" not in config:  # another program of verl, for example supervised training
        return False
    worker_variables: Any = select(config, f"{RAY}.runtime_env.env_vars") or {}
    platforms = [str(variables.get("VERL_PLATFORM", "")) for variables in (os.environ, worker_variables)]
    return any(platform.strip().lower() == "cpu" for platform in platforms)


def needs_gpu(run: Run) -> Iterator[Finding]:
    """Reject values that do not work without an accelerator, if the run is meant for the CPU."""
    config = run.config
    if not asks_for_cpu(config):
        return
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    requirements = [*requirements_of_model("actor_rollout_ref.actor", "actor_rollout_ref.model")]
    if need_reference_policy(config):
        requirements += requirements_of_model("actor_rollout_ref.ref", "actor_rollout_ref.model")
    if need_critic(config):
        requirements += requirements_of_model("critic", "critic.model")
    requirements += ROLLOUT_REQUIREMENTS
    for path, valid, reason in dict.fromkeys(requirements):
        value = run.select(path)
        if value in valid:
            continue
        shown = "null" if value is None else value
        others = f" Valid values are {listed(valid)}." if len(valid) > 1 else ""
        yield Finding(
            "error",
            f"{path}={shown} does not work on the CPU, because {reason}.{others}",
            f"Set ++{path}={valid[0]}.",
        )
    yield from _sends_weights_to_other_process(run)


def _sends_weights_to_other_process(run: Run) -> Iterator[Finding]:
    """Reject `separate_async` with a checkpoint engine of verl; a custom engine may work without an accelerator."""
    is_separate = run.select(TRAINER_MODE) == "separate_async"
    has_custom_engine = run.select(f"{ROLLOUT}.checkpoint_engine.custom_backend_module") is not None
    if uses_default_trainer(run.config) and is_separate and not has_custom_engine:
        yield Finding(
            "error",
            f"{TRAINER_MODE}=separate_async does not work on the CPU, because verl's checkpoint engines for it need a "
            "GPU.",
            f"Set ++{TRAINER_MODE}=colocate_async.",
        )


def ignored_cluster(run: Run) -> Iterator[Finding]:
    """Warn about RAY_ADDRESS, which is ignored if the run starts its own Ray instance, as with the preset `cpu`."""
    cluster = os.environ.get("RAY_ADDRESS", "")
    if cluster in ("", "local") or run.select(f"{RAY}.address") != "local" or not asks_for_cpu(run.config):
        return
    changes = [f"++{RAY}.address={cluster}"]
    for slots in (f"{RAY}.num_cpus", f"{RAY}.num_gpus"):
        if run.select(slots) is not None:  # Ray accepts these numbers only for an instance that it starts
            changes.append(f"{slots}=null")
    yield Finding(
        "warning",
        f"The environment variable RAY_ADDRESS={cluster} is ignored, because {RAY}.address=local starts a separate Ray "
        "instance for this run. The preset cpu sets this value.",
        f"Set {' '.join(changes)} to use the cluster.",
    )
