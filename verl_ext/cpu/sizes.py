"""Fit a run to a machine without an accelerator: threads per process, tokens per micro-batch, answers at once.

The preset `cpu` leaves the sizes open. `fill` sets them from the machine and the model before Ray starts.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

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
