"""Switch verl to the CPU on request: verl imports this module in every process, through the `verl.plugins` entry point.

It is never switched on by itself: a machine without a GPU may be the head node of a GPU cluster. It is on:

- in the driver, with `+verl_ext=cpu`, or any configuration that gives Ray's workers `VERL_PLATFORM=cpu`;
- in every other process, and in scripts, with the environment variable `VERL_PLATFORM=cpu`.

Because every process imports this module, it does not import torch, ray or verl.
"""

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_ext.hooks import after_import, resolve, wrap

HIDDEN = "VERL_EXT_CPU_GPUS_HIDDEN"
"""Set by a driver whose CUDA_VISIBLE_DEVICES was empty; the processes of its Ray cluster inherit it."""


@functools.cache
def activate() -> None:
    """Switch this process to the CPU: schedule the platform, the patches and the embedded rollout."""
    os.environ["VERL_PLATFORM"] = "cpu"
    # Where it is empty, which says "no GPU", Ray rejects its virtual slots: only the workers have it again.
    in_worker = "RAY_RAYLET_PID" in os.environ
    if not in_worker and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]
        os.environ[HIDDEN] = "1"
    elif in_worker and HIDDEN in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # verl registers its engines under an accelerator's name; the FSDP engine needs no accelerator.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    after_import("verl.plugin.platform.platform_manager", _register_platform)
    adapter = {("embedded", "async"): "verl_ext.cpu.rollout.EmbeddedRollout"}
    after_import("verl.workers.rollout.base", lambda module: module._ROLLOUT_REGISTRY.update(adapter))
    replica = functools.partial(resolve, "verl_ext.cpu.rollout:EmbeddedReplica")
    after_import(
        "verl.workers.rollout.replica", lambda module: module.RolloutReplicaRegistry.register("embedded", replica)
    )
    after_import("verl.checkpoint_engine.base", _register_checkpoint_engine)
    from verl_ext.cpu.patches import PATCHES

    for module_name, patch in PATCHES.items():
        after_import(module_name, patch)


def _set_device(original: Callable[..., Any], config: Any) -> None:
    """Read the configuration before verl uses it: `main_ppo.main` calls `auto_set_device` first."""
    from verl_ext.checks.on_cpu import asks_for_cpu
    from verl_ext.cpu import sizes

    if asks_for_cpu(config):
        activate()
        sizes.fill(config)
    else:
        original(config)


def _register_platform(module: ModuleType) -> None:
    from verl_ext.cpu.platform import NAME, CPUPlatform

    manager: Any = module
    manager.PlatformRegistry.register(NAME)(CPUPlatform)
    if manager._current_platform is not None and manager._current_platform.device_name != NAME:
        # In the driver verl chose its platform before the configuration was read.
        manager._current_platform = CPUPlatform()


def _register_checkpoint_engine(_module: ModuleType) -> None:
    import verl_ext.cpu.weights  # noqa: F401 - registers itself


after_import("verl.utils.device", lambda module: wrap(module, "auto_set_device", _set_device))
if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    activate()
