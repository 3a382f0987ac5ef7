"""verl on machines without an accelerator: what is scheduled in every process, and what switches it on.

It is asked for, never guessed, because a head node without a GPU before a cluster of GPUs looks like a laptop:

- in the driver by the configuration, `+verl_ext=cpu` (any configuration whose Ray workers get `VERL_PLATFORM=cpu`),
  or by `trainer.device=cpu` where verl finds no accelerator either;
- in every other process, and in scripts, by the environment variable `VERL_PLATFORM=cpu`.

Nothing here imports torch, ray or verl: it runs in every process that imports verl.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from verl_ext.integration.compat.imports import after_import

_active = False


def install() -> None:
    """Schedule what may be needed; called once in every process that imports verl."""
    after_import("verl.utils.device", _watch_configuration)
    after_import("hydra.core.config_store", _store_configurations)
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        activate()


def activate() -> None:
    """Make this process one without an accelerator: the platform, the patches, the embedded rollout."""
    global _active
    if _active:
        return
    _active = True
    os.environ["VERL_PLATFORM"] = "cpu"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        # A usual way to say "no GPU"; Ray would refuse the virtual slots for it.
        del os.environ["CUDA_VISIBLE_DEVICES"]
    # verl registers its engines for accelerators by name; the FSDP one needs none.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    after_import("verl.plugin.platform.platform_manager", _register_platform)
    after_import("verl.workers.rollout.base", _register_adapter)
    after_import("verl.workers.rollout.replica", _register_replica)
    after_import("verl.checkpoint_engine", _register_checkpoint_engine)
    from verl_ext.cpu import patches

    for module_name, patch in patches.PATCHES.items():
        after_import(module_name, patch)


def _watch_configuration(module: ModuleType) -> None:
    """See the configuration before verl uses it: follows `main_ppo.main`, which begins with `auto_set_device`.

    verl (0.9.0, 0.9.1) would set `trainer.device` to the accelerator that it assumes where it found none.
    """
    original = getattr(module, "auto_set_device", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def auto_set_device(config: Any) -> None:
        from verl_ext.cpu import checks

        if checks.asks_for_cpu(config):
            activate()
            checks.check(config)
        else:
            original(config)

    module.auto_set_device = auto_set_device  # type: ignore[attr-defined]


def _store_configurations(module: ModuleType) -> None:
    from verl_ext.conf import store

    store(module.ConfigStore.instance())


def _register_platform(module: ModuleType) -> None:
    from verl_ext.cpu.platform import NAME, CPUPlatform

    manager: Any = module
    manager.PlatformRegistry.register(NAME)(CPUPlatform)
    current = manager._current_platform
    if current is not None and current.device_name != NAME:
        # In the driver verl has looked before the configuration was read, and assumed an accelerator.
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
