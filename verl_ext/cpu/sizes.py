"""Fit a run to a machine without an accelerator: threads per process, tokens per micro-batch, concurrent responses.

The preset `cpu` leaves the sizes open. `fill` sets them from the machine and the model before Ray starts.
"""

import json
import os
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

THREADS = "OMP_NUM_THREADS"
TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
MOST_TOKENS = 16384
"""verl's default of `ppo_max_token_len_per_gpu`, which a small model keeps."""
MICRO_BATCH_BYTES = 2.5e9
"""Logits and activations of one micro-batch in a default run."""
MOST_RESPONSES = 256
"""verl's default of `max_num_seqs`, which a small model keeps."""
CACHE_BYTES = 1.5e9
"""Keys and values of the responses that the embedded rollout generates concurrently, less than a micro-batch needs."""
COPIES_OF_LOGITS = 6
"""In the update, in fp32: logits, log-softmax, entropy and their gradients."""


def fill(config: Any) -> None:
    """Set threads, tokens per micro-batch and concurrent responses if the configuration leaves them open."""
    with open_dict(config):
        variables = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars")
        if variables is not None and THREADS not in variables:
            # Not all ranks compute all the time, but they do in the update, the longest part of a step.
            cores = len(os.sched_getaffinity(0))
            variables[THREADS] = os.environ.get(THREADS) or str(max(1, cores // config.trainer.n_gpus_per_node))
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        tokens, responses = _what_fits(config)
        if actor.ppo_max_token_len_per_gpu is None:
            actor.ppo_max_token_len_per_gpu = tokens
        if rollout.max_num_seqs is None:
            rollout.max_num_seqs = responses if rollout.name == "embedded" else MOST_RESPONSES


def _what_fits(config: Any) -> tuple[int, int]:
    """Return tokens per micro-batch, at least one whole sequence, and concurrent responses of full length.

    Both are at most verl's defaults. Return verl's defaults for a model on the Hugging Face Hub, which may not be
    downloaded yet, and for a model whose configuration has other names for its sizes.
    """
    file = Path(config.actor_rollout_ref.model.path).expanduser() / "config.json"
    values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    values = values.get("text_config", values)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if not all(isinstance(values.get(name), int) for name in names):
        return MOST_TOKENS, MOST_RESPONSES
    vocabulary, hidden, inner, layers, heads = (values[name] for name in names)
    # Bytes of a token in fp32: in the update without gradient checkpointing, and its keys and values.
    update = 4 * (COPIES_OF_LOGITS * vocabulary + layers * (12 * hidden + 4 * inner))
    keys = (values.get("num_key_value_heads") or heads) * (values.get("head_dim") or hidden // heads)
    cache = 4 * 2 * layers * keys
    sequence = int(config.data.max_prompt_length + config.data.max_response_length)
    tokens = max(sequence, min(MOST_TOKENS, int(MICRO_BATCH_BYTES / update)))
    return tokens, max(1, min(MOST_RESPONSES, int(CACHE_BYTES / (sequence * cache))))
