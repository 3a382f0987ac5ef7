"""Patches for what a platform cannot change in verl. Most wrap a function of verl, which is their first argument."""

import operator
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_ext.hooks import wrap

Function = Callable[..., Any]
REHEARSAL = "VERL_EXT_REHEARSAL"
"""The environment variable with the folder of a rehearsal, in which verl's processes record their progress."""


def reached(name: str, text: str = "") -> None:
    """In a rehearsal, add a line to a file of its folder."""
    if folder := os.environ.get(REHEARSAL):
        with (Path(folder) / name).open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")


def filtered(original: Function, self: Any, dataframe: Any = None) -> Any:
    """Record how many prompts a dataset had before and after filtering."""
    kept = original(self, dataframe)
    reached("prompts", f"{len(dataframe)} {len(kept)}")
    return kept


def process_group(original: Function, timeout_second: int | None = None, backend: str | None = None) -> None:
    """One backend for one device.

    verl asks for "cpu:gloo" and the platform's own backend. On the CPU both are gloo, and torch rejects the duplicate.
    """
    original(timeout_second=timeout_second, backend=backend or "cpu:gloo")


def replay_buffer(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Poll every 50 ms, not every 2 s: a step of a tiny model takes less than 2 s."""
    original(self, *args, **kwargs)
    self.poll_interval = min(self.poll_interval, 0.05)


def offload_policy(module: ModuleType) -> None:
    """`CPUOffloadPolicy` in `verl.workers.engine.fsdp.transformer_impl`: no pinned memory, which needs an accelerator.

    verl offloads a reference model with `CPUOffloadPolicy(pin_memory=True)`.
    """
    original = module.CPUOffloadPolicy
    module.CPUOffloadPolicy = lambda **_: original(pin_memory=False)  # type: ignore[attr-defined]


def value_model(
    _original: Function, local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool
) -> Any:
    """The configured attention, for a critic: verl asks for flash attention here, whatever the configuration says."""
    from transformers import AutoModelForTokenClassification

    return AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation=model_config._attn_implementation,
        trust_remote_code=trust_remote_code,
    )


def padding(module: ModuleType) -> None:
    """`verl.utils.attention_utils` without flash-attn, in branches of verl without functions of their own."""
    if find_spec("flash_attn") is None and not hasattr(module, "_fallback_pad_input"):
        wrap(module, "_get_attention_functions", padding_of_transformers)


def padding_of_transformers(_original: Function) -> tuple[Function, Function, None, Function]:
    """The functions that verl would import from flash-attn."""
    from transformers.modeling_flash_attention_utils import _pad_input, _unpad_input

    return operator.getitem, _pad_input, None, _unpad_input  # verl does not call the third, `rearrange`


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "verl.utils.distributed": lambda module: wrap(module, "initialize_global_process_group_ray", process_group),
    "verl.trainer.ppo.v1.replay_buffer": lambda module: wrap(module.ReplayBuffer, "__init__", replay_buffer),
    "verl.workers.engine.fsdp.transformer_impl": offload_policy,
    "verl.utils.dataset.rl_dataset": lambda module: wrap(module.RLHFDataset, "maybe_filter_out_long_prompts", filtered),
    "verl.utils.model": lambda module: wrap(module, "load_valuehead_model", value_model),
    "verl.utils.attention_utils": padding,
}
