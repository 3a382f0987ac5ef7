"""Switch verl to the CPU on request, and schedule what that needs in every process.

It is never switched on by itself, because the head node of a GPU cluster may have no GPU, like a laptop. It is on:

- in the driver, with `+verl_ext=cpu` (or any configuration that gives Ray's workers `VERL_PLATFORM=cpu`), or with
  `trainer.device=cpu` if verl finds no accelerator;
- in every other process, and in scripts, with the environment variable `VERL_PLATFORM=cpu`.

This module does not import torch, ray or verl, because every process that imports verl runs it.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from verl_ext.integration.hooks import after_import

_active = False


def install() -> None:
    """Schedule the hooks; called once in every process that imports verl."""
    after_import("verl.utils.device", _watch_configuration)
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        activate()


def activate() -> None:
    """Switch this process to the CPU: schedule the platform, the patches and the embedded rollout."""
    global _active
    if _active:
        return
    _active = True
    os.environ["VERL_PLATFORM"] = "cpu"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        # Often set to say "no GPU", but then Ray rejects the virtual slots.
        del os.environ["CUDA_VISIBLE_DEVICES"]
    # verl registers its engines under an accelerator's name; the FSDP engine needs no accelerator.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    after_import("verl.plugin.platform.platform_manager", _register_platform)
    after_import("verl.workers.rollout.base", _register_adapter)
    after_import("verl.workers.rollout.replica", _register_replica)
    after_import("verl.checkpoint_engine", _register_checkpoint_engine)
    from verl_ext.cpu import patches

    for module_name, patch in patches.PATCHES.items():
        after_import(module_name, patch)


def _watch_configuration(module: ModuleType) -> None:
    """Read the configuration before verl uses it, in `auto_set_device`, which `main_ppo.main` calls first.

    verl (0.9.0, 0.9.1) itself sets `trainer.device` to its default accelerator if it finds none.
    """
    original = getattr(module, "auto_set_device", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def auto_set_device(config: Any) -> None:
        from verl_ext.cpu import checks, sizes

        if checks.asks_for_cpu(config):
            sizes.require_numbers(config)
            activate()
            sizes.fill(config)
            checks.check(config)
            checks.log_remarks(config)
        else:
            original(config)

    module.auto_set_device = auto_set_device  # type: ignore[attr-defined]


def _register_platform(module: ModuleType) -> None:
    from verl_ext.cpu.platform import NAME, CPUPlatform

    manager: Any = module
    manager.PlatformRegistry.register(NAME)(CPUPlatform)
    current = manager._current_platform
    if current is not None and current.device_name != NAME:
        # In the driver verl chose its platform before the configuration was read.
        manager._current_platform = CPUPlatform()


def _register_adapter(module: ModuleType) -> None:
    module._ROLLOUT_REGISTRY[("embedded", "async")] = "verl_ext.cpu.rollout.EmbeddedRollout"


def _register_replica(module: ModuleType) -> None:
    def load() -> Any:
        from verl_ext.cpu.rollout import EmbeddedReplica

        return EmbeddedReplica

    module.RolloutReplicaRegistry.register("embedded", load)


def _register_checkpoint_engine(_module: ModuleType) -> None:
    import verl_ext.cpu.weights  # noqa: F401 - registers itself
