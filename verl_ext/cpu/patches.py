"""Patches for what a platform cannot change in verl.

`plugin.PATCHES` lists the functions that take a module of verl. The other functions replace a function of verl, which
is their first argument (see `hooks.wrap`).
"""

import operator
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from verl_ext.cpu.progress import PROMPTS, record
from verl_ext.hooks import wrap

Function = Callable[..., Any]


def use_one_backend(distributed: ModuleType) -> None:
    """Patch `verl.utils.distributed` to initialize the process group with one backend."""
    wrap(distributed, "initialize_global_process_group_ray", _initialize_process_group)


def _initialize_process_group(
    original: Function, timeout_second: int | None = None, backend: str | None = None
) -> None:
    """Ask for gloo once.

    verl asks for "cpu:gloo" and the platform's own backend. On the CPU both are gloo, and torch rejects the duplicate.
    """
    original(timeout_second=timeout_second, backend=backend or "cpu:gloo")


def poll_often(replay_buffer: ModuleType) -> None:
    """Patch `verl.trainer.ppo.v1.replay_buffer` to poll for responses more often."""
    wrap(replay_buffer.ReplayBuffer, "__init__", _set_poll_interval)


def _set_poll_interval(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Poll every 50 ms instead of every 2 s, because a step of a tiny model takes less than 2 s."""
    original(self, *args, **kwargs)
    self.poll_interval = min(self.poll_interval, 0.05)


def offload_without_pinned_memory(transformer_impl: ModuleType) -> None:
    """Patch `verl.workers.engine.fsdp.transformer_impl`, because pinned memory needs an accelerator.

    verl offloads a reference model with `CPUOffloadPolicy(pin_memory=True)`.
    """
    original = transformer_impl.CPUOffloadPolicy

    def without_pinned_memory(**_settings: Any) -> Any:
        return original(pin_memory=False)

    transformer_impl.CPUOffloadPolicy = without_pinned_memory  # type: ignore[attr-defined]


def count_prompts(rl_dataset: ModuleType) -> None:
    """Patch `verl.utils.dataset.rl_dataset` to record how many prompts a dataset keeps."""
    wrap(rl_dataset.RLHFDataset, "maybe_filter_out_long_prompts", _filter_and_record)


def _filter_and_record(original: Function, self: Any, dataframe: Any = None) -> Any:
    """Record the number of prompts before and after filtering."""
    kept = original(self, dataframe)
    record(PROMPTS, f"{len(dataframe)} {len(kept)}")
    return kept


def use_configured_attention(model: ModuleType) -> None:
    """Patch `verl.utils.model`, which loads every critic with flash attention."""
    wrap(model, "load_valuehead_model", _load_critic)


def _load_critic(
    _original: Function, local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool
) -> Any:
    """Load a critic with the attention of its configuration."""
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation=model_config._attn_implementation,
        trust_remote_code=trust_remote_code,
    )


def pad_without_flash_attn(attention_utils: ModuleType) -> None:
    """Patch `verl.utils.attention_utils` if flash-attn is not installed.

    Some branches of verl have functions of their own for this case (`_fallback_pad_input`).
    """
    if find_spec("flash_attn") is None and not hasattr(attention_utils, "_fallback_pad_input"):
        wrap(attention_utils, "_get_attention_functions", _padding_of_transformers)


def _padding_of_transformers(_original: Function) -> tuple[Function, Function, None, Function]:
    """Return functions of transformers instead of those that verl would import from flash-attn."""
    from transformers.modeling_flash_attention_utils import _pad_input, _unpad_input

    index_first_axis = operator.getitem
    rearrange = None  # verl does not call it
    return index_first_axis, _pad_input, rearrange, _unpad_input
