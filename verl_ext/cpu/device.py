"""The functions of `torch.cuda` that verl uses, for a process without an accelerator.

The memory functions return the memory of this process. Names that are not here come from `torch.cpu`, which lacks most
of these functions.
"""

import resource
from typing import Any

import psutil
import torch


def __getattr__(name: str) -> Any:
    return getattr(torch.cpu, name)


def do_nothing(*_args: object, **_kwargs: object) -> None:
    """Do nothing: a CPU has no queue and no cache, and verl seeds torch's global generator itself."""


set_device = synchronize = manual_seed = manual_seed_all = do_nothing
empty_cache = ipc_collect = reset_peak_memory_stats = do_nothing


def is_available() -> bool:
    """Return False, as `torch.cuda` without a GPU. With True, verl 0.9.0 collects garbage (0.3 s) in every call."""
    return False


def device_count() -> int:
    """Return 1: the CPU is one device, whatever its number of cores."""
    return 1


def current_device() -> torch.device:
    """Return a device, where `torch.cuda` returns an index, because an index would mean an accelerator."""
    return torch.device("cpu")


def get_device_name(*_device: object) -> str:
    """Return the name of the device."""
    return "cpu"


def get_device_capability(*_device: object) -> tuple[None, None]:
    """Return no compute capability."""
    return None, None


def memory_allocated(*_device: object) -> int:
    """Return the resident memory of this process, in bytes."""
    return int(psutil.Process().memory_info().rss)


def max_memory_allocated(*_device: object) -> int:
    """Return the largest resident memory that this process has had, in bytes."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes * 1024


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def mem_get_info(*_device: object) -> tuple[int, int]:
    """Return the available and the total memory of the machine, in bytes."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def get_rng_state(*_device: object) -> torch.Tensor:
    """Return the state of torch's global generator, which is the CPU's. verl seeds and saves it as well."""
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, *_device: object) -> None:
    """Set the state of torch's global generator."""
    torch.set_rng_state(state)
