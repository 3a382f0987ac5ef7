"""Fit a run to a machine without an accelerator: threads per process, tokens per micro-batch, memory, number formats.

The preset `cpu` leaves the sizes open. `fill` sets them from the machine and the model before Ray starts.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf, open_dict

_log = logging.getLogger("verl_ext")

THREADS = "OMP_NUM_THREADS"
TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
MOST_TOKENS = 16384
"""verl's default of `ppo_max_token_len_per_gpu`, which a small model keeps."""
MICRO_BATCH_BYTES = 2.5e9
"""Logits and activations of one micro-batch in a default run."""
MOST_ANSWERS = 256
"""verl's default of `max_num_seqs`, which a small model keeps."""
CACHE_BYTES = 1.5e9
"""Keys and values of the answers that the embedded rollout generates at once, less than a micro-batch of the update."""
PROCESSES_BYTES = 3.9e9
"""Memory of verl's processes alone, without a model, as it was measured."""
COPIES_OF_LOGITS = 6
"""In the update, in fp32: logits, log-softmax, entropy and their gradients."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a language model that decide its memory."""

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    keys: int
    """Numbers in the keys of one token and layer; its values are as many."""

    @property
    def parameters(self) -> float:
        """About: embeddings, attention (grouped keys and values count as one), and a gated feed-forward part."""
        return self.vocabulary * self.hidden + self.layers * (3 * self.hidden**2 + 3 * self.hidden * self.inner)

    @property
    def bytes_per_token(self) -> float:
        """Logits and activations of one token in the update, in fp32, without gradient checkpointing."""
        return 4 * (COPIES_OF_LOGITS * self.vocabulary + self.layers * (12 * self.hidden + 4 * self.inner))

    @property
    def cache_per_token(self) -> float:
        """Bytes of the keys and values of one token, in fp32."""
        return 4 * 2 * self.layers * self.keys


def sizes_of(config: Any) -> Sizes | None:
    """The sizes in the model folder's config.json; None for a model on a hub, or one that names its sizes otherwise."""
    file = Path(config.actor_rollout_ref.model.path).expanduser() / "config.json"
    if not file.is_file():
        return None
    values = json.loads(file.read_text(encoding="utf-8"))
    values = values.get("text_config", values)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if not all(isinstance(values.get(name), int) for name in names):
        return None
    vocabulary, hidden, inner, layers, heads = (values[name] for name in names)
    keys = (values.get("num_key_value_heads") or heads) * (values.get("head_dim") or hidden // heads)
    return Sizes(vocabulary, hidden, inner, layers, keys)


def ranks(config: Any) -> int:
    """The number of training ranks. verl counts them as GPUs, also on the CPU."""
    return int(config.trainer.n_gpus_per_node * config.trainer.nnodes)


def whole_sequence(config: Any) -> int:
    """Tokens of the longest prompt with its longest answer."""
    return int(config.data.max_prompt_length + config.data.max_response_length)


def fill(config: Any) -> None:
    """Set threads, tokens of a micro-batch and answers generated at once where the configuration leaves them open."""
    with open_dict(config):
        variables = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars")
        if variables is not None and THREADS not in variables:
            # Not all ranks compute all the time, but they do in the update, the longest part of a step.
            cores = len(os.sched_getaffinity(0))
            variables[THREADS] = os.environ.get(THREADS) or str(max(1, cores // config.trainer.n_gpus_per_node))
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        if actor.ppo_max_token_len_per_gpu is None:
            actor.ppo_max_token_len_per_gpu = tokens_per_micro_batch(config)
        if rollout.max_num_seqs is None:
            rollout.max_num_seqs = answers_at_once(config) if rollout.name == "embedded" else MOST_ANSWERS
    if (needed := peak_bytes(config)) is not None:
        tokens = actor.ppo_max_token_len_per_gpu
        _log.info("this run needs about %.1f GB of memory (ppo_max_token_len_per_gpu=%d)", needed / 1e9, tokens)


def tokens_per_micro_batch(config: Any) -> int:
    """As many as `MICRO_BATCH_BYTES` hold, at least one whole sequence, at most verl's default.

    A model on a hub gets verl's default: its sizes are not known before it is downloaded.
    """
    sizes = sizes_of(config)
    if sizes is None:
        return MOST_TOKENS
    return max(whole_sequence(config), min(MOST_TOKENS, int(MICRO_BATCH_BYTES / sizes.bytes_per_token)))


def answers_at_once(config: Any) -> int:
    """As many answers as `CACHE_BYTES` hold at their full length, at least one, at most verl's default."""
    sizes = sizes_of(config)
    if sizes is None:
        return MOST_ANSWERS
    return max(1, min(MOST_ANSWERS, int(CACHE_BYTES / (whole_sequence(config) * sizes.cache_per_token))))


def peak_bytes(config: Any) -> float | None:
    """About the memory that a run needs at its peak, in the update. A critic counts as large as the actor."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    sizes = sizes_of(config)
    if sizes is None:
        return None
    here = int(config.trainer.n_gpus_per_node)
    # Weights, gradients and Adam's two moments, shared by the ranks.
    weights = 16 * sizes.parameters * (1 + need_critic(config))
    # The rollouts', one a rank, and the reference's.
    copies = 4 * sizes.parameters * (here + need_reference_policy(config))
    tokens = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu or tokens_per_micro_batch(config)
    return float(PROCESSES_BYTES + weights + copies + here * tokens * sizes.bytes_per_token)


def free_bytes() -> int | None:
    """The memory that programs can still take, also in a container; None where the system does not say."""
    free = [proc_bytes("/proc/meminfo", "MemAvailable"), _free_in_container()]
    return min((number for number in free if number is not None), default=None)


def _free_in_container(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Memory that Linux's control group (version 2) leaves to a container; None without a limit.

    The page cache counts as used there, but the kernel takes its inactive part back when memory runs short.
    """
    try:
        limit, taken = (int((root / name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        counts = dict(line.split() for line in (root / "memory.stat").read_text(encoding="ascii").splitlines())
    except (OSError, ValueError):  # another version, or `max`: no limit
        return None
    return max(0, limit - taken + int(counts.get("inactive_file", 0)))


def proc_bytes(file: str, field: str) -> int | None:
    """A field of a file of Linux's procfs that is in kB; None on other systems."""
    try:
        with open(file, encoding="ascii") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)
    except OSError:
        return None


SUPPORTED = dict.fromkeys(("bf16", "bfloat16"), "_is_mkldnn_bf16_supported")
SUPPORTED |= dict.fromkeys(("fp16", "float16", "16"), "_is_mkldnn_fp16_supported")
"""Maps FSDP's and torch's names of a number format to the torch op that reports native products. It is not public."""


def is_fast(dtype: str) -> bool:
    """Whether torch multiplies matrices of this format with the processor's own instructions.

    Without them (bf16 needs AVX-512 on x86) a product in bf16 took 68 to 92 times as long as in fp32. A torch without
    the call counts as fast.
    """
    supported = getattr(torch.ops.mkldnn, SUPPORTED[dtype], None) if dtype in SUPPORTED else None
    return supported is None or bool(supported())
