"""Find out whether a run is meant for the CPU, and complain about what cannot run there."""

import os
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from verl_ext.errors import Finding, listed
from verl_ext.run_config import RunConfig

ROLLOUT = "actor_rollout_ref.rollout"
RAY = "ray_kwargs.ray_init"


def asks_for_cpu(config: Any) -> bool:
    """Whether this run trains on the CPU: see `verl_ext.cpu.plugin`."""
    if "actor_rollout_ref" not in config:  # another program of verl, for example supervised training
        return False
    of_workers = OmegaConf.select(config, f"{RAY}.runtime_env.env_vars") or {}
    return any(str(known.get("VERL_PLATFORM", "")).strip().lower() == "cpu" for known in (os.environ, of_workers))


def rule(run: RunConfig) -> Iterator[Finding]:
    """Settings of which only one value, or few, work without an accelerator, if the run is meant for it."""
    config = run.config
    if not asks_for_cpu(config):
        return
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    models = {"actor_rollout_ref.actor": "actor_rollout_ref.model"}
    models |= {"actor_rollout_ref.ref": "actor_rollout_ref.model"} if need_reference_policy(config) else {}
    models |= {"critic": "critic.model"} if need_critic(config) else {}
    rows: dict[str, tuple[tuple[Any, ...], str]] = {}
    for engine, model in models.items():
        attention = f"{model}.override_config.attn_implementation"
        rows[f"{engine}.strategy"] = ("fsdp2",), "other engines refuse parameters on the CPU"
        rows[attention] = ("sdpa", "eager"), "flash attention needs a GPU"
        rows[f"{model}.use_remove_padding"] = (False,), "flash attention needs a GPU"
    rows[f"{ROLLOUT}.name"] = ("embedded",), "others need a GPU"  # a user's own line wins over the preset before it
    # The rollout returns log-probabilities of the distribution that it samples from.
    rows[f"{ROLLOUT}.logprobs_mode"] = ("processed_logprobs",), "the embedded rollout has no other mode"
    rows[f"{ROLLOUT}.tensor_model_parallel_size"] = (1,), "a replica of the embedded rollout is one process"
    for path, (valid, reason) in rows.items():
        value = OmegaConf.select(config, path)
        if value not in valid:
            text = f"{path} is {value!r}, but {reason}; valid on the CPU: {listed(valid)}; set ++{path}={valid[0]}"
            yield Finding(text)


def ignored_cluster(run: RunConfig) -> Iterator[Finding]:
    """A cluster that the environment names, while the run starts a Ray of its own, as with the preset `cpu`."""
    cluster = os.environ.get("RAY_ADDRESS", "")
    if cluster in ("", "local") or run.select(f"{RAY}.address") != "local" or not asks_for_cpu(run.config):
        return
    changes = [f"++{RAY}.address={cluster}"]
    for slots in (f"{RAY}.num_cpus", f"{RAY}.num_gpus"):
        if run.select(slots) is not None:  # Ray accepts them only for a Ray that it starts
            changes.append(f"{slots}=null")
    text = (
        f"the environment variable RAY_ADDRESS={cluster} is ignored, because {RAY}.address=local, as in the preset "
        f"cpu, starts a Ray for this run alone. To use the cluster, set {' '.join(changes)}"
    )
    yield Finding(text, fatal=False)
