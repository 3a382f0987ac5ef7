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
PATCHES = {
    "verl.plugin.platform.platform_manager": "verl_ext.cpu.platform:register_platform",
    "verl.trainer.ppo.v1.replay_buffer": "verl_ext.cpu.patches:poll_often",
    "verl.utils.attention_utils": "verl_ext.cpu.patches:pad_without_flash_attn",
    "verl.utils.dataset.rl_dataset": "verl_ext.cpu.patches:count_prompts",
    "verl.utils.distributed": "verl_ext.cpu.patches:use_one_backend",
    "verl.utils.model": "verl_ext.cpu.patches:use_configured_attention",
    "verl.workers.engine.fsdp.transformer_impl": "verl_ext.cpu.patches:offload_without_pinned_memory",
}
"""Modules of verl, and the function that changes each of them after its import."""
ROLLOUT = "embedded"
"""The name of the rollout: `actor_rollout_ref.rollout.name`."""


@functools.cache
def activate() -> None:
    """Switch this process to the CPU: schedule the platform, the patches and the embedded rollout."""
    os.environ["VERL_PLATFORM"] = "cpu"
    # verl registers its engines under an accelerator's name; the FSDP engine needs no accelerator.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    _hide_gpus_only_in_workers()
    for module_name, target in PATCHES.items():
        after_import(module_name, functools.partial(_apply, target))
    after_import("verl.workers.rollout.base", _register_adapter)
    after_import("verl.workers.rollout.replica", _register_replica)


def _hide_gpus_only_in_workers() -> None:
    """Remove an empty CUDA_VISIBLE_DEVICES, which says "no GPU", from the driver, and restore it in the workers.

    With the empty variable in the driver, Ray rejects its virtual slots.
    """
    is_worker = "RAY_RAYLET_PID" in os.environ
    if not is_worker and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        del os.environ["CUDA_VISIBLE_DEVICES"]
        os.environ[HIDDEN] = "1"
    elif is_worker and HIDDEN in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _apply(target: str, module: ModuleType) -> None:
    patch = resolve(target)
    patch(module)


def _register_adapter(base: ModuleType) -> None:
    base._ROLLOUT_REGISTRY[ROLLOUT, "async"] = "verl_ext.cpu.rollout.EmbeddedRollout"


def _register_replica(replica: ModuleType) -> None:
    load_class = functools.partial(resolve, "verl_ext.cpu.rollout:EmbeddedReplica")
    replica.RolloutReplicaRegistry.register(ROLLOUT, load_class)


def _set_device(original: Callable[..., Any], config: Any) -> None:
    """Read the configuration before verl uses it: `main_ppo.main` calls `auto_set_device` first."""
    from verl_ext.checks.on_cpu import asks_for_cpu
    from verl_ext.cpu.sizes import set_open_sizes

    if asks_for_cpu(config):
        activate()
        set_open_sizes(config)
    else:
        original(config)


def _wrap_auto_set_device(device: ModuleType) -> None:
    wrap(device, "auto_set_device", _set_device)


after_import("verl.utils.device", _wrap_auto_set_device)
if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    activate()
