"""Adapt verl to a machine without an accelerator: a platform, and patches where verl does not ask its platform.

`plugin.PATCHES` lists the functions that take a module of verl. The other functions replace a function of verl, which
is their first argument (see `hooks.wrap`).
"""

import operator
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from verl.plugin.platform import PlatformBase

from verl_ext.cpu import device
from verl_ext.cpu.progress import PROMPTS, record
from verl_ext.hooks import wrap

NAME = "cpu"
"""The name under which verl finds the platform: `VERL_PLATFORM=cpu`."""
Function = Callable[..., Any]


class CPUPlatform(PlatformBase):
    """verl on the CPU: gloo, shared memory, and Ray's `GPU` resource as virtual slots, one per rank."""

    device_name = NAME
    vendor_name = NAME
    device_module = device

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """False, so that verl never selects it by itself: the head node of a GPU cluster may have no GPU."""
        return False

    def current_device(self) -> Any:
        """A device, not an index: verl passes it to `Tensor.to`, where an index would mean an accelerator."""
        return device.current_device()

    def device_count(self) -> int:
        return device.device_count()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return device.get_device_capability()

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Not CUDA_VISIBLE_DEVICES: if that is empty, Ray rejects the virtual slots."""
        return "VERL_EXT_CPU_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        """The only resource besides NPU that verl's resource pools count."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Keep Ray from setting CUDA_VISIBLE_DEVICES for the virtual slots."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """False: there is no device memory to share, so verl sends weights through shared memory."""
        return False

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    set_device = synchronize = manual_seed = manual_seed_all = device.do_nothing
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = device.do_nothing


def register_platform(platform_manager: Any) -> None:
    """Register the platform under its name, and select it if verl has already selected another one."""
    platform_manager.PlatformRegistry.register(NAME)(CPUPlatform)
    selected = platform_manager._current_platform
    # In the driver, verl selects its platform before it reads the configuration.
    if selected is not None and selected.device_name != NAME:
        platform_manager._current_platform = CPUPlatform()


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
