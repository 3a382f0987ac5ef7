"""A platform of `verl.plugin.platform` for machines without an accelerator.

Only verl may import this module, through the plugin. If it is imported before verl, verl loads the plugin while this
module is incomplete.
"""

from contextlib import nullcontext
from typing import Any

from verl.plugin.platform import PlatformBase

from verl_ext.cpu import device

NAME = "cpu"
"""The name under which verl finds the platform: `VERL_PLATFORM=cpu`."""


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
