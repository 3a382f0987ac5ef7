"""A platform of `verl.plugin.platform` for machines without an accelerator."""

import resource
import types
from contextlib import nullcontext
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase

NAME = "cpu"
"""The name under which verl finds this platform: `VERL_PLATFORM=cpu`."""


def _nothing(*_args: object, **_kwargs: object) -> None:
    return None


def _resident(*_args: object) -> int:
    return int(psutil.Process().memory_info().rss)


def _peak(*_args: object) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_module() -> types.ModuleType:
    """A stand-in for `torch.cuda` with all that verl uses; its memory counters show this process's memory.

    `torch.cpu` lacks most of these names (`empty_cache`, `max_memory_allocated`, `ipc_collect`, ...).
    """
    module = types.ModuleType("verl_ext.cpu.device", "torch.cuda's names for a process without an accelerator")
    names = vars(module)
    names.update((name, value) for name, value in vars(torch.cpu).items() if not name.startswith("_"))
    for name in ("empty_cache", "ipc_collect", "set_device", "reset_peak_memory_stats", "manual_seed", "synchronize"):
        names[name] = _nothing
    names.update(
        manual_seed_all=_nothing,
        # As torch.cuda without a GPU. With True, verl 0.9.0 would collect garbage (0.3 s) around every call of a rank.
        is_available=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: torch.device("cpu"),
        get_device_name=lambda *_: "cpu",
        get_device_capability=lambda *_: (None, None),
        memory_allocated=_resident,
        memory_reserved=_resident,
        max_memory_allocated=_peak,
        max_memory_reserved=_peak,
        mem_get_info=lambda *_: (psutil.virtual_memory().available, psutil.virtual_memory().total),
        # The CPU's generator is torch's global one, which verl seeds and saves as well.
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
    )
    return module


class CPUPlatform(PlatformBase):
    """verl on the CPU: gloo, shared memory, and Ray's `GPU` resource as virtual slots, one per rank."""

    device_name = NAME
    vendor_name = NAME
    device_module = device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """False, so that verl never selects it by itself: the head node of a GPU cluster may have no GPU."""
        return False

    def current_device(self) -> Any:
        """A device, not an index: verl passes it to `Tensor.to`, where an index would mean an accelerator."""
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

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

    # A CPU has no queue, no cache and no profiler, and verl seeds torch's global generator itself.
    set_device = synchronize = manual_seed = manual_seed_all = _nothing
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _nothing
