"""Fit a run to a machine without an accelerator: threads per process, tokens per micro-batch, concurrent responses.

The preset `cpu` leaves these sizes open. `set_open_sizes` sets them before Ray starts, from the machine and the model.
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf, open_dict

THREADS = "OMP_NUM_THREADS"
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
BYTES_OF_FP32 = 4


class ModelSizes(NamedTuple):
    """The sizes of a model that decide how much memory a token needs."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    keys: int
    """The numbers in the keys of one token and layer. The values have as many."""


def set_open_sizes(config: Any) -> None:
    """Set threads, tokens per micro-batch and concurrent responses if the configuration leaves them open."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    tokens, responses = _tokens_and_responses_that_fit(config)
    with open_dict(config):
        _set_threads(config)
        if actor.ppo_max_token_len_per_gpu is None:
            actor.ppo_max_token_len_per_gpu = tokens
        if rollout.max_num_seqs is None:
            rollout.max_num_seqs = responses if rollout.name == "embedded" else MOST_RESPONSES


def _set_threads(config: Any) -> None:
    """Set the threads of verl's processes: those of the shell, else the cores divided by the ranks."""
    variables = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars")
    if variables is None or THREADS in variables:
        return
    # Not all ranks compute all the time, but they do in the update, the longest part of a step.
    cores = len(os.sched_getaffinity(0))
    threads_of_rank = max(1, cores // config.trainer.n_gpus_per_node)
    variables[THREADS] = os.environ.get(THREADS) or str(threads_of_rank)


def _tokens_and_responses_that_fit(config: Any) -> tuple[int, int]:
    """Return the tokens of a micro-batch, and the concurrent responses of full length.

    Both are at most verl's defaults, but a micro-batch has at least the tokens of one whole sequence. If the sizes of
    the model are unknown, both are verl's defaults.
    """
    model = _read_model_sizes(config.actor_rollout_ref.model.path)
    if model is None:
        return MOST_TOKENS, MOST_RESPONSES
    sequence_length = int(config.data.max_prompt_length + config.data.max_response_length)
    # The update runs without gradient checkpointing.
    activations = model.layers * (12 * model.hidden + 4 * model.intermediate)
    update_bytes = BYTES_OF_FP32 * (COPIES_OF_LOGITS * model.vocabulary + activations)
    cache_bytes = BYTES_OF_FP32 * 2 * model.layers * model.keys
    tokens = int(MICRO_BATCH_BYTES / update_bytes)
    responses = int(CACHE_BYTES / (sequence_length * cache_bytes))
    return max(sequence_length, min(MOST_TOKENS, tokens)), max(1, min(MOST_RESPONSES, responses))


def _read_model_sizes(path: str) -> ModelSizes | None:
    """Read the sizes from the `config.json` of a model.

    Return None for a model on the Hugging Face Hub, which may not be downloaded yet, and for a configuration with other
    names of the sizes.
    """
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        return None
    values = json.loads(file.read_text(encoding="utf-8"))
    values = values.get("text_config") or values
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if not all(isinstance(values.get(name), int) for name in names):
        return None
    vocabulary, hidden, intermediate, layers, heads = (values[name] for name in names)
    key_heads = values.get("num_key_value_heads") or heads
    head_size = values.get("head_dim") or hidden // heads
    return ModelSizes(vocabulary, hidden, intermediate, layers, keys=key_heads * head_size)
